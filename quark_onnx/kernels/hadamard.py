"""Construct orthogonal matrices with entries of even magnitude, to spread outliers.

Hadamard matrices of Sylvester, Paley (1933, both constructions) and Williamson (1944, circulants
that are constant on the cosets of a group of multipliers), and their Kronecker products. A
``Rotation`` keeps the factors apart, so that rotating n channels costs n times the sum of their
sizes instead of n squared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Greatest size of power-of-two factors, and greatest order of other factors.
_CHUNK = 64
_LARGEST_CORE = 512
#: Greatest size of power-of-four factors that keep the ones: there, all entries can be equal.
_BENT_CHUNK = 16
#: Most random signs that are tried for a matrix that keeps the ones, and most products for a large
#: one.
_TRIALS = 1000
_STEPS = 1 << 28
#: Most cosets in the search for circulants of signs.
_MOST_COSETS = 7


#: The matrix of order 2.
_PAIR = np.array([[1.0, 1.0], [1.0, -1.0]])


@dataclass(frozen=True, eq=False)
class Rotation:
    """An orthogonal matrix: ``diag(signs) (factors[0] x factors[1] x ...)``, Kronecker products.

    Attributes:
        factors: orthogonal matrices.
        signs: signs of the channels before they are mixed; None for no change.
    """

    factors: tuple[Floats, ...]
    signs: Floats | None = None

    @property
    def size(self) -> int:
        """Number of channels."""
        return prod(len(factor) for factor in self.factors)

    def turn(self, array: NDArray[np.floating], axis: int = -1) -> Floats:
        """Multiply every vector along an axis by the matrix, in float64; the shape stays.

        An axis of several times the size is rotated part by part.

        >>> Rotation((hadamard(2),)).turn(np.array([1.0, 1.0, 0.0, 2.0])).round(3)
        array([ 1.414,  0.   ,  1.414, -1.414])
        """
        moved = np.moveaxis(np.asarray(array, np.float64), axis, -1)
        result = moved.reshape(-1, self.size)
        if self.signs is not None:
            result = result * self.signs
        # A Kronecker product acts on each digit of a mixed-radix index by one factor: size * sum
        # of orders multiplications for a vector, in place of size^2.
        inner = self.size
        for factor in self.factors:
            inner //= len(factor)
            parts = result.reshape(-1, len(factor), inner)
            if inner == 1:
                result = parts[..., 0] @ factor
            else:
                result = np.matmul(factor.T, parts)
        rotated: Floats = np.moveaxis(result.reshape(moved.shape), -1, axis)
        return rotated

    def matrix(self) -> Floats:
        """Return the matrix, of shape (size, size)."""
        return self.turn(np.eye(self.size))


@cache
def hadamard(order: int) -> Floats:
    """Return a normalized Hadamard matrix with a constant first row.

    Raises:
        ValueError: no construction gives this order.

    >>> bool(np.allclose(hadamard(12) @ hadamard(12).T, np.eye(12)))
    True
    """
    signs = _signs(order)
    if signs is None:
        raise ValueError(f"no Hadamard matrix of order {order} is constructed")
    # Columns are scaled so that the first row is constant: ``balanced`` relies on it.
    result: Floats = signs * signs[0] / np.sqrt(order)
    result.setflags(write=False)
    return result


def random_hadamard(size: int, seed: int) -> Rotation:
    """Return a Hadamard matrix after random signs, or a random orthogonal matrix.

    >>> [len(factor) for factor in random_hadamard(384, seed=0).factors]
    [12, 32]
    """
    random = np.random.default_rng((seed, size))
    parts = _parts(size)
    if parts is None:
        return Rotation((_orthogonal(size, random),))
    core, power = parts
    orders = [*core, *_chunks(power, _CHUNK)] or [1]
    factors = tuple(hadamard(order) for order in orders)
    return Rotation(factors, random.choice([-1.0, 1.0], size))


def balanced(size: int, seed: int) -> Rotation:
    """Return a random rotation that keeps the vector of ones, and so means.

    A Hadamard matrix H with a constant first row gives ``H^T diag(1, signs) H``. The signs with the
    most even entries are taken; with bent functions, for 4 and 16 channels, all entries are equal.

    >>> bool(np.allclose(balanced(96, seed=0).turn(np.ones(96)), 1))
    True
    """
    random = np.random.default_rng((seed, size))
    parts = _parts(size)
    if parts is None:
        basis = np.linalg.qr(
            np.column_stack([np.ones(size), random.normal(size=(size, size - 1))]),
        )[0]
        inner = np.eye(size)
        inner[1:, 1:] = _orthogonal(size - 1, random)
        return Rotation((basis @ inner @ basis.T,))
    core, power = parts
    orders = list(core)
    # An odd power of two has no bent functions.
    if power.bit_length() % 2 == 0:
        odd = 2 if core else min(power, 8)
        orders = [core[0] * odd] if core else [odd]
        power //= odd
    orders = [*orders, *_chunks(power, _BENT_CHUNK)] or [1]
    return Rotation(tuple(_keeping_ones(order, random) for order in orders))


def _keeping_ones(order: int, random: np.random.Generator) -> Floats:
    base = hadamard(order)
    best = np.eye(order)
    for _ in range(min(_TRIALS, _STEPS // order**3)):
        signs = random.choice([-1.0, 1.0], order)
        # The first row of H is constant: with sign 1 there, the vector of ones is kept.
        signs[0] = 1.0
        candidate = base.T @ (signs[:, None] * base)
        # Within rounding errors the earlier candidate stays, whatever the BLAS.
        if np.abs(candidate).max() < np.abs(best).max() - 1e-12:
            best = candidate
    return best


def _orthogonal(size: int, random: np.random.Generator) -> Floats:
    """Return a matrix uniformly distributed over the orthogonal ones (Stewart 1980)."""
    q, r = np.linalg.qr(random.normal(size=(size, size)))
    # QR alone is biased; the signs make the distribution uniform (Mezzadri 2007).
    uniform: Floats = q * np.sign(np.diag(r))
    return uniform


def _chunks(power: int, chunk: int) -> list[int]:
    """Return a power of two as factors up to ``chunk``."""
    factors = []
    while power > 1:
        factors.append(min(power, chunk))
        power //= factors[-1]
    return factors


def _parts(size: int) -> tuple[tuple[int, ...], int] | None:
    """Return a size as the order of a matrix, if not a power of two, times a power of two.

    None if there is no such matrix.
    """
    # The greatest power of two that divides the size.
    power = size & -size
    odd = size // power
    if odd == 1:
        return (), size
    order = 4 * odd
    while size % order == 0 and order <= _LARGEST_CORE:
        if _signs(order) is not None:
            return (order,), size // order
        order *= 2
    return None


@cache
def _signs(order: int) -> Floats | None:
    """Return a matrix of signs with orthogonal rows; None for an unknown order."""
    if order in (1, 2):
        return _PAIR[:order, :order]
    # 4 divides every order above 2.
    if order < 1 or order % 4:
        return None
    # Powers of two are left to the doubling of Sylvester below.
    if order & (order - 1):
        for construct in (_paley_first, _paley_second, _williamson):
            matrix = construct(order)
            if matrix is not None:
                return matrix
    half = _signs(order // 2)
    if half is None:
        return None
    return np.kron(_PAIR, half)


def _is_prime(number: int) -> bool:
    return number > 1 and all(
        number % divisor for divisor in range(2, int(number**0.5) + 1)
    )


def _residues(prime: int) -> Floats:
    """Return the Jacobsthal matrix: Legendre symbols of the differences of rows and columns."""
    symbol = np.full(prime, -1.0)
    # Squares have the symbol 1, other numbers -1, and 0 has 0.
    symbol[np.arange(prime) ** 2 % prime] = 1.0
    symbol[0] = 0.0
    index = np.arange(prime)
    matrix: Floats = symbol[(index[:, None] - index) % prime]
    return matrix


def _paley_first(order: int) -> Floats | None:
    """Construct order q + 1, for a prime q = 3 modulo 4."""
    q = order - 1
    if q % 4 != 3 or not _is_prime(q):
        return None
    skew = np.zeros((order, order))
    skew[0, 1:] = 1.0
    skew[1:, 0] = -1.0
    skew[1:, 1:] = _residues(q)
    return skew + np.eye(order)


def _paley_second(order: int) -> Floats | None:
    """Construct order 2 (q + 1), for a prime q = 1 modulo 4."""
    q = order // 2 - 1
    if q % 4 != 1 or not _is_prime(q):
        return None
    symmetric = np.zeros((q + 1, q + 1))
    symmetric[0, 1:] = symmetric[1:, 0] = 1.0
    symmetric[1:, 1:] = _residues(q)
    off = _PAIR
    on = np.array([[1.0, -1.0], [-1.0, -1.0]])
    return np.kron(symmetric, off) + np.kron(np.eye(q + 1), on)


def _williamson(order: int) -> Floats | None:
    """Construct order 4 m, for some primes m, from four symmetric circulants of order m.

    Their squares add up to 4 m.
    """
    m = order // 4
    if not _is_prime(m) or m == 2:
        return None
    for size in range(m - 1, 1, -2):
        if (m - 1) % size or (m - 1) // size > _MOST_COSETS:
            continue
        rows = _four_circulants(m, _cosets(m, size))
        if rows is not None:
            index = np.arange(m)
            a, b, c, d = (row[(index[:, None] - index) % m] for row in rows)
            # Williamson's array: symmetric circulants commute, which makes its rows orthogonal.
            return np.block(
                [[a, b, c, d], [-b, a, -d, c], [-c, d, a, -b], [-d, -c, b, a]]
            )
    return None


def _cosets(prime: int, size: int) -> list[list[int]]:
    """Return the cosets of the group of ``size`` multipliers modulo a prime."""
    root = _primitive_root(prime)
    index = (prime - 1) // size
    cosets = []
    for shift in range(index):
        coset = [pow(root, shift + index * k, prime) for k in range(size)]
        cosets.append(coset)
    return cosets


def _primitive_root(prime: int) -> int:
    for candidate in range(2, prime):
        powers = {pow(candidate, k, prime) for k in range(1, prime)}
        if len(powers) == prime - 1:
            return candidate
    raise ValueError(f"{prime} has no primitive root: it is not an odd prime")


def _four_circulants(m: int, cosets: list[list[int]]) -> list[Floats] | None:
    """Return four rows of signs, constant on cosets, whose power spectra add up to 4 m."""
    rows = np.ones((2 ** len(cosets), m))
    choices = product([1.0, -1.0], repeat=len(cosets))
    for row, signs in zip(rows, choices, strict=True):
        for coset, sign in zip(cosets, signs, strict=True):
            row[coset] = sign
    # Cosets of a group of even size hold -k with k: the rows are symmetric, their spectra real.
    # Spectra are constant on cosets as well, so that one frequency of each is enough.
    spectra = np.fft.fft(rows).real[:, [0, *(coset[0] for coset in cosets)]] ** 2
    left, right = np.triu_indices(len(rows))
    sums = spectra[left] + spectra[right]
    # Meet in the middle: for every sum of two spectra, look up the sum that completes it to 4 m.
    pairs = {
        tuple(np.rint(total * 16).astype(int)): pair
        for pair, total in reversed(list(enumerate(sums)))
    }
    for pair, total in enumerate(sums):
        match = pairs.get(tuple(np.rint((4 * m - total) * 16).astype(int)))
        if match is not None:
            chosen = (left[pair], right[pair], left[match], right[match])
            circulants = [rows[index] for index in chosen]
            # Rounding to sixteenths may match by chance.
            spectrum = sum(np.abs(np.fft.fft(row)) ** 2 for row in circulants)
            if np.allclose(spectrum, 4 * m):
                return circulants
    return None
