"""How far an option of another tool has an effect here."""

from __future__ import annotations

from typing import Literal

OptionSupport = Literal["obeyed", "not needed", "refused"]
