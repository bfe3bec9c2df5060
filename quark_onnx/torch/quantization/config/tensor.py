"""QTensorConfig: quantization settings of a tensor with AMD Quark's API names.

The counterpart in this package is TensorSpec.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from quark_onnx.common.errors import ConfigError
from quark_onnx.config.checks import require_known
from quark_onnx.dtypes import Integer
from quark_onnx.torch.checkpoints import quark_json
from quark_onnx.torch.config.spec import TensorSpec
from quark_onnx.torch.quantization.config.fields import Fields, plain
from quark_onnx.torch.quantization.config.type import (
    Dtype,
    QSchemeType,
    RoundType,
    ScaleType,
    ZeroPointType,
)
from quark_onnx.torch.quantization.observer.observer import (
    OBSERVERS,
    Observer,
    PerChannelMinMaxObserver,
)

#: Formats that are supported only as elements of blocks.
_IN_BLOCKS = (Dtype.fp4, Dtype.fp6_e2m3, Dtype.fp6_e3m2)
#: Supported values of fields, and the meaning of unsupported ones.
# A value outside of these would change the result silently.
_COMPUTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "qat_spec": ((None,), "training is not done"),
    "round_method": (
        (None, RoundType.half_even),
        "values are rounded to the nearest, ties to even",
    ),
    "zero_point_type": ((ZeroPointType.int32,), "zero points are integers"),
    "scale_format": (
        (None, "e8m0", "e5m3", "float32"),
        "blocks have scales in e8m0, in e5m3 or as floats",
    ),
    "block_size": ((None,), "blocks of two axes are not computed"),
}


@dataclass
class QTensorConfig(Fields):
    """Quantization settings of a tensor, with the fields of AMD Quark 0.13.

    Defaults are those of AMD Quark, too. ``enable_buffer_reuse`` and ``max_input_numel`` have no
    effect on the result.

    >>> str(QTensorConfig("int8", "PerTensorMinMaxObserver", False, "per_tensor", symmetric=True).spec())
    'int8 symmetric model scales minmax'
    """  # noqa: E501

    ENUMS: ClassVar[Mapping[str, type[Enum]]] = {
        "dtype": Dtype,
        "qscheme": QSchemeType,
        "round_method": RoundType,
        "scale_type": ScaleType,
        "mx_element_dtype": Dtype,
        "zero_point_type": ZeroPointType,
    }

    dtype: Dtype | str
    observer_cls: type[Observer] | str | None = None
    is_dynamic: bool | None = None
    qscheme: QSchemeType | str | None = None
    ch_axis: int | None = None
    group_size: int | None = None
    block_size: Any = None
    symmetric: bool | None = None
    round_method: RoundType | str | None = None
    scale_type: ScaleType | str | None = None
    scale_format: str | None = None
    scale_calculation_mode: str | None = None
    qat_spec: Any = None
    mx_element_dtype: Dtype | str | None = None
    zero_point_type: ZeroPointType | str = ZeroPointType.int32
    is_scale_quant: bool = False
    enable_buffer_reuse: bool = False
    max_input_numel: int = 4194304

    def __setattr__(self, name: str, value: Any) -> None:
        # Names in files become classes here, as enumerations do in the base class.
        super().__setattr__(name, _observer(value) if name == "observer_cls" else value)

    def set_group_size(self, group_size: int) -> None:
        """Change the group size.

        Raises:
            ConfigError: there are no groups.
        """
        if self.qscheme is not QSchemeType.per_group:
            raise ConfigError(
                f"set_group_size: qscheme is {plain(self.qscheme)}; only per_group has"
                " groups",
            )
        self.group_size = group_size

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a checkpoint's configuration."""
        entry = super().to_dict()
        # Not part of a checkpoint: training is not supported.
        del entry["qat_spec"]
        return entry

    def spec(self, where: str = "QTensorConfig") -> TensorSpec:
        """Convert the settings to a TensorSpec.

        Args:
            where: the name of the settings in errors.

        Raises:
            ConfigError: the settings are not supported, or contradictory.
        """
        return spec_of(self, where)


def spec_of(given: QTensorConfig | Sequence[QTensorConfig], where: str) -> TensorSpec:
    """Convert the settings of a tensor, or its stages, to a TensorSpec.

    Args:
        given: the settings, or a sequence of stages.
        where: the name of the settings in errors.

    Raises:
        ConfigError: the settings are not supported, or contradictory.
    """
    # One stage, or two: formats of codes, then of the codes' or the scales' own.
    stages: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    if not stages or not all(isinstance(stage, QTensorConfig) for stage in stages):
        raise ConfigError(
            f"{where} is {given!r}; it must be a QTensorConfig; a helper has one:"
            " .to_quantization_spec()",
        )
    for stage in stages:
        _check(stage, where)
    first_stage = stages[0]
    # Without a format of scales these elements have no meaning that a kernel knows.
    has_shared_exponents = first_stage.scale_format in ("e8m0", "e5m3")
    if (
        len(stages) == 1
        and first_stage.dtype in _IN_BLOCKS
        and not has_shared_exponents
    ):
        raise ConfigError(
            f"{where}: scale_format is {first_stage.scale_format!r}; blocks of"
            f" {plain(first_stage.dtype)} have scales in 'e8m0' (OCP_MX... specs), or in two"
            " stages (ScaleQuantSpec)",
        )
    try:
        # The reader of checkpoints has all combinations that are supported.
        spec = quark_json.spec_from_json([stage.to_dict() for stage in stages], "it")
    except ConfigError as error:
        raise ConfigError(f"{where}, {plain(stages[0].dtype)}: {error}") from error
    assert spec is not None
    _check_symmetry(stages, spec, where)
    return _observed(spec, first_stage.observer_cls, where)


def _check_symmetry(
    stages: Sequence[QTensorConfig],
    spec: TensorSpec,
    where: str,
) -> None:
    """Raise ConfigError unless integers say whether they have a zero point, and others do not."""
    if not isinstance(spec.dtype, Integer):
        if stages[0].symmetric is False:
            raise ConfigError(
                f"{where}: symmetric is False, but {spec.dtype.name} has no zero point",
            )
        return
    # The last stage has the integer codes: int4 after fp8 in int4_fp8.
    if stages[-1].symmetric is None:
        raise ConfigError(
            f"{where}: symmetric is None; for {spec.dtype.name} it must be True or"
            " False",
        )


def _observed(spec: TensorSpec, observer: Any, where: str) -> TensorSpec:
    """Return a spec with the calibration method and the scales of an observer, or None.

    The entry of a checkpoint has no observer, as its scales are known already.

    Raises:
        ConfigError: the observer needs data, and scales are computed at run time.
    """
    if observer is None:
        return spec
    # Dynamic scales come from the extremes of each token or tensor at run time.
    if spec.dynamic and observer.calibrator != Observer.calibrator:
        raise ConfigError(
            f"{where}: {observer.__name__} needs data, but is_dynamic is set",
        )
    pow2 = observer.pow2 or spec.pow2
    return spec.with_(calibrator=observer.calibrator, pow2=pow2)


def _check(config: QTensorConfig, where: str) -> None:
    for name, (fine, why) in _COMPUTED.items():
        if (value := getattr(config, name)) not in fine:
            raise ConfigError(
                f"{where}: {name} is {plain(value)!r}, which is not supported: {why}",
            )
    observer: Any = config.observer_cls
    scheme = plain(config.qscheme)
    if observer is not None and scheme and scheme not in _schemes_of(observer):
        raise ConfigError(
            f"{where}: qscheme is {scheme}, but {observer.__name__} is for"
            f" {observer.scheme}",
        )
    grouped = config.qscheme is QSchemeType.per_group
    if grouped and not config.group_size:
        raise ConfigError(f"{where}: qscheme is per_group, and there is no group_size")
    if scheme and config.group_size and not grouped:
        raise ConfigError(
            f"{where}: group_size is {config.group_size}, but qscheme is {scheme}",
        )


def _schemes_of(observer: type[Observer]) -> Container[str]:
    """Return the granularities for which an observer is meant."""
    if observer is PerChannelMinMaxObserver:
        return ("per_channel", "per_group")  # as documented: extremes of each group
    if observer.scheme:
        return (observer.scheme,)
    return QSchemeType.__members__


def _observer(value: Any) -> Any:
    """Return an observer by class, name, or class of AMD Quark."""
    # Observers of AMD Quark itself are recognized by their names below.
    if value is None or (isinstance(value, type) and issubclass(value, Observer)):
        return value
    name = getattr(value, "__name__", str(value))
    require_known(name, OBSERVERS, "observer_cls is")
    return OBSERVERS[name]
