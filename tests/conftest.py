"""Settings of the whole suite: no test fails because the machine was slow for a moment."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("steady", deadline=None)
settings.load_profile("steady")
