"""For all tests: no example of a property fails because the machine was busy."""

from hypothesis import settings

settings.register_profile("shared_machine", deadline=None)
settings.load_profile("shared_machine")
