from __future__ import annotations

import pytest

from asyncrl.errors import AsyncRLError, ConfigError, EngineError, ProtocolError, RemoteError, describe_error, rebuild_error


@pytest.mark.parametrize("change", [{"kind": 3}, {"message": None}, {"traceback": 1}, {"attributes": []}, {"attributes": {1: 2}},
                                    {"attributes": {"__class__": "x"}}])
def test_an_error_that_was_not_described_by_us_is_malformed(change: dict) -> None:
    with pytest.raises(ProtocolError):
        rebuild_error(describe_error(ValueError("x")) | change, where="child 'e'")
    with pytest.raises(ProtocolError):
        rebuild_error({}, where="child 'e'")


def test_a_mistake_may_be_moved_to_where_its_section_stands() -> None:
    error = ConfigError("sampling.stop, sampling, sampling_rate, engine.sampling", value=1, allowed="a", remedy="b")
    assert error.moved("sampling", "a.b").field == "a.b.stop, a.b, sampling_rate, engine.sampling"


def test_our_errors_are_rebuilt_as_their_class_and_others_are_remote() -> None:
    config = rebuild_error(describe_error(ConfigError("a.b", value=2, allowed="1", remedy="Take 1.")), where="child 'e'")
    assert type(config) is ConfigError
    assert str(config) == "a.b = 2 is not allowed: 1. Take 1."
    assert (config.field, config.value, config.remedy) == ("a.b", 2, "Take 1.")
    assert type(rebuild_error(describe_error(EngineError("full")), where="child 'e'")) is EngineError
    for kind in (KeyError("x"), type("TYPE_CHECKING", (Exception,), {})("x")):
        remote = rebuild_error(describe_error(kind), where="child 'e'")
        assert type(remote) is RemoteError
        assert str(remote).startswith(f"child 'e': {type(kind).__name__}: ")
    assert isinstance(remote, AsyncRLError)


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("not I")


@pytest.mark.parametrize(("value", "shown"), [("x" * 10_000, "'xxx"), (16**5000, "<int; ValueError when shown>"),
                                              (Unshown(), "<Unshown; RuntimeError when shown>")],
                         ids=["long", "number", "unshown"])
def test_a_value_that_is_long_or_cannot_be_shown_leaves_the_message_readable(value: object, shown: str) -> None:
    error = ConfigError("run.steps", value=value, allowed="a number", remedy="Give one.")
    assert f"run.steps = {shown}" in str(error)
    assert str(error).endswith("is not allowed: a number. Give one.")
    assert len(str(error)) < 1000
    assert error.value is value
