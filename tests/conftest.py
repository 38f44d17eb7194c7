"""For all tests: no example of a property fails because the machine was busy, and two runs of the suite try the same examples.

`HYPOTHESIS_PROFILE=explore` draws new ones, which is for hunting, not for judging a change.
"""

import os

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
