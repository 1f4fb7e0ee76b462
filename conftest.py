"""What every test here shares, those of core and those of the plugins: how hypothesis draws."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A run says the same twice; `--hypothesis-profile default` draws new cases.
settings.register_profile("repeatable", derandomize=True, database=None)
# How long a case takes says how busy the machine is, not whether the code is right. The other health checks stay.
for name in ("repeatable", "default", "ci"):
    untimed = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile(name, settings(settings.get_profile(name), **untimed))
settings.load_profile("repeatable")
