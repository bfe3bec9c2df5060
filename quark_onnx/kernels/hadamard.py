"""Orthogonal matrices whose entries are as even as can be: rotating by one spreads an outlier over
all channels.

Hadamard matrices of Sylvester, Paley (1933, both constructions) and Williamson (1944, circulants
that are constant on the cosets of a group of multipliers), and their Kronecker products. A
``Rotation`` keeps the factors apart, so that turning n channels costs n times the sum of their
sizes instead of n squared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Powers of two are cut into factors of this size, and what is no power of two is sought in factors
#: up to that one.
_CHUNK, _LARGEST_CORE = 64, 512
#: Of matrices that keep the ones, powers of four are cut into factors of this size: there, all
#: entries can be alike.
_BENT_CHUNK = 16
#: So many choices of signs are tried, at most, for a matrix that keeps the ones, and for a large
#: one so many products.
_TRIALS, _STEPS = 1000, 1 << 28
#: Circulants of signs are sought that are constant on no more cosets than this.
_MOST_COSETS = 7


@dataclass(frozen=True, eq=False)
class Rotation:
    """An orthogonal matrix: ``diag(signs) (factors[0] x factors[1] x ...)``, Kronecker products.

    Attributes:
        factors: orthogonal matrices.
        signs: of the channels before they are mixed; None for no change.
    """

    factors: tuple[Floats, ...]
    signs: Floats | None = None

    @property
    def size(self) -> int:
        """How many channels are mixed."""
        return int(np.prod([len(factor) for factor in self.factors]))

    def turn(self, array: NDArray[np.floating], axis: int = -1) -> Floats:
        """Every vector along an axis times the matrix, in float64; the shape stays.

        An axis that is several times as long is turned part by part.

        >>> Rotation((hadamard(2),)).turn(np.array([1.0, 1.0, 0.0, 2.0])).round(3)
        array([ 1.414,  0.   ,  1.414, -1.414])
        """
        moved = np.moveaxis(np.asarray(array, np.float64), axis, -1)
        result = moved.reshape(-1, self.size)
        if self.signs is not None:
            result = result * self.signs
        inner = self.size
        for factor in self.factors:
            inner //= len(factor)
            parts = result.reshape(-1, len(factor), inner)
            result = (
                parts[..., 0] @ factor if inner == 1 else np.matmul(factor.T, parts)
            )
        turned: Floats = np.moveaxis(result.reshape(moved.shape), -1, axis)
        return turned

    def matrix(self) -> Floats:
        """The matrix, of shape (size, size)."""
        return self.turn(np.eye(self.size))


@cache
def hadamard(order: int) -> Floats:
    """A Hadamard matrix divided by the root of its order; its first row is constant.

    Raises:
        ValueError: of this order none is constructed here.

    >>> bool(np.allclose(hadamard(12) @ hadamard(12).T, np.eye(12)))
    True
    """
    found = _signs(order)
    if found is None:
        raise ValueError(f"no Hadamard matrix of order {order} is constructed")
    result: Floats = found * found[0] / np.sqrt(order)
    result.setflags(write=False)
    return result


def random_hadamard(size: int, seed: int) -> Rotation:
    """A Hadamard matrix behind random signs.

    Where there is none of this size, any orthogonal matrix.

    >>> [len(factor) for factor in random_hadamard(384, seed=0).factors]
    [12, 32]
    """
    random, parts = np.random.default_rng((seed, size)), _parts(size)
    if parts is None:
        return Rotation((_orthogonal(size, random),))
    core, power = parts
    orders = [*core, *_chunks(power, _CHUNK)] or [1]
    return Rotation(tuple(map(hadamard, orders)), random.choice([-1.0, 1.0], size))


def balanced(size: int, seed: int) -> Rotation:
    """A random rotation with the vector of ones as a fixed point: it keeps means, and so layer
    normalizations.

    A Hadamard matrix H with a constant first row gives ``H^T diag(1, signs) H``. The signs that
    make its entries the most even are taken; where there are bent functions, for 4 and 16 channels,
    all entries are alike.

    >>> bool(np.allclose(balanced(96, seed=0).turn(np.ones(96)), 1))
    True
    """
    random, parts = np.random.default_rng((seed, size)), _parts(size)
    if parts is None:
        basis = np.linalg.qr(
            np.column_stack([np.ones(size), random.normal(size=(size, size - 1))]),
        )[0]
        inner = np.eye(size)
        inner[1:, 1:] = _orthogonal(size - 1, random)
        return Rotation((basis @ inner @ basis.T,))
    core, power = parts
    orders = list(core)
    if power.bit_length() % 2 == 0:  # an odd power of two has no bent functions
        odd = 2 if core else min(power, 8)
        orders = [core[0] * odd] if core else [odd]
        power //= odd
    orders = [*orders, *_chunks(power, _BENT_CHUNK)] or [1]
    return Rotation(tuple(_keeping_ones(order, random) for order in orders))


def _keeping_ones(order: int, random: np.random.Generator) -> Floats:
    base, best = hadamard(order), np.eye(order)
    for _ in range(min(_TRIALS, _STEPS // order**3)):
        signs = random.choice([-1.0, 1.0], order)
        signs[0] = 1.0
        found = base.T @ (signs[:, None] * base)
        if np.abs(found).max() < np.abs(best).max() - 1e-12:
            best = found
    return best


def _orthogonal(size: int, random: np.random.Generator) -> Floats:
    """Uniform among the orthogonal matrices (Stewart 1980)."""
    q, r = np.linalg.qr(random.normal(size=(size, size)))
    uniform: Floats = q * np.sign(np.diag(r))
    return uniform


def _chunks(power: int, chunk: int) -> list[int]:
    """A power of two as factors no larger than ``chunk``."""
    found = []
    while power > 1:
        found.append(min(power, chunk))
        power //= found[-1]
    return found


def _parts(size: int) -> tuple[tuple[int, ...], int] | None:
    """A size as the order of a matrix, if a power of two is not enough, times a power of two.

    None if there is none.
    """
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
    """A matrix of signs with orthogonal rows; None if none of the constructions gives one."""
    if order in (1, 2):
        return np.array([[1.0, 1.0], [1.0, -1.0]])[:order, :order]
    if order < 1 or order % 4:
        return None
    if order & (order - 1):
        for construct in (_paley_first, _paley_second, _williamson):
            found = construct(order)
            if found is not None:
                return found
    half = _signs(order // 2)
    return None if half is None else np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), half)


def _is_prime(number: int) -> bool:
    return number > 1 and all(
        number % divisor for divisor in range(2, int(number**0.5) + 1)
    )


def _residues(prime: int) -> Floats:
    """The Jacobsthal matrix: the Legendre symbol of the difference of row and column."""
    symbol = np.full(prime, -1.0)
    symbol[np.arange(prime) ** 2 % prime] = 1.0
    symbol[0] = 0.0
    place = np.arange(prime)
    matrix: Floats = symbol[(place[:, None] - place) % prime]
    return matrix


def _paley_first(order: int) -> Floats | None:
    """Of order q + 1, for a prime q = 3 modulo 4."""
    q = order - 1
    if q % 4 != 3 or not _is_prime(q):
        return None
    skew = np.zeros((order, order))
    skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1.0, -1.0, _residues(q)
    return skew + np.eye(order)


def _paley_second(order: int) -> Floats | None:
    """Of order 2 (q + 1), for a prime q = 1 modulo 4."""
    q = order // 2 - 1
    if q % 4 != 1 or not _is_prime(q):
        return None
    symmetric = np.zeros((q + 1, q + 1))
    symmetric[0, 1:] = symmetric[1:, 0] = 1.0
    symmetric[1:, 1:] = _residues(q)
    off, on = np.array([[1.0, 1.0], [1.0, -1.0]]), np.array([[1.0, -1.0], [-1.0, -1.0]])
    return np.kron(symmetric, off) + np.kron(np.eye(q + 1), on)


def _williamson(order: int) -> Floats | None:
    """Of order 4 m, for some primes m: four symmetric circulants of order m whose squares add up to
    4 m.
    """
    m = order // 4
    if not _is_prime(m) or m == 2:
        return None
    for size in (size for size in range(m - 1, 1, -2) if (m - 1) % size == 0):
        if (m - 1) // size <= _MOST_COSETS and (
            rows := _four_circulants(m, _cosets(m, size))
        ) is not None:
            place = np.arange(m)
            a, b, c, d = (row[(place[:, None] - place) % m] for row in rows)
            return np.block(
                [[a, b, c, d], [-b, a, -d, c], [-c, d, a, -b], [-d, -c, b, a]],
            )
    return None


def _cosets(prime: int, size: int) -> list[list[int]]:
    """Of the group of multipliers of this size, in the multiplicative group of a prime."""
    root = next(
        g
        for g in range(2, prime)
        if len({pow(g, k, prime) for k in range(1, prime)}) == prime - 1
    )
    index = (prime - 1) // size
    return [
        [pow(root, shift + index * k, prime) for k in range(size)]
        for shift in range(index)
    ]


def _four_circulants(m: int, cosets: list[list[int]]) -> list[Floats] | None:
    """Signs, constant on cosets that are closed under negation, whose power spectra add up to 4 m."""  # noqa: E501
    rows = np.ones((2 ** len(cosets), m))
    for row, signs in zip(rows, product([1.0, -1.0], repeat=len(cosets)), strict=True):
        for coset, sign in zip(cosets, signs, strict=True):
            row[coset] = sign
    spectra = np.fft.fft(rows).real[:, [0, *(coset[0] for coset in cosets)]] ** 2
    one, other = np.triu_indices(len(rows))
    sums = spectra[one] + spectra[other]
    pairs = {
        tuple(np.rint(total * 16).astype(int)): place
        for place, total in reversed(list(enumerate(sums)))
    }
    for place, total in enumerate(sums):
        match = pairs.get(tuple(np.rint((4 * m - total) * 16).astype(int)))
        if match is not None:
            found = [
                rows[index]
                for index in (one[place], other[place], one[match], other[match])
            ]
            if np.allclose(sum(np.abs(np.fft.fft(row)) ** 2 for row in found), 4 * m):
                return found
    return None
