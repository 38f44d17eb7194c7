import numpy as np
import pytest

from asyncrl.errors import ConfigError, NonFiniteError, ShapeError
from asyncrl.records import KeptSets, TokenRecords
from asyncrl.types import NOT_SAMPLED, Batch, Prompt, Rollout, RolloutGroup, Sampling, Sequence, SequenceBuilder, Span, Status


def sampled(builder, *tokens, version, fresh=True, turn=0):
    logprobs = np.full(len(tokens), -0.25, np.float32)
    builder.sampled(np.array(tokens, np.int32), logprobs=logprobs, policy_version=version, kv_fresh=fresh, turn=turn)


def two_turns():
    """Prompt [1 2], tokens [5 6] by version 3 and [7] by 4, a tool's [8], then [9] by 4."""
    builder = SequenceBuilder([1, 2])
    sampled(builder, 5, 6, version=3)
    sampled(builder, 7, version=4)
    builder.given([8], turn=0)
    sampled(builder, 9, version=4, turn=1)
    return builder.build()


def test_every_token_carries_version_mask_logprob_and_turn():
    sequence = two_turns()
    assert sequence.tokens.tolist() == [1, 2, 5, 6, 7, 8, 9]
    assert sequence.loss_mask.tolist() == [False, False, True, True, True, False, True]
    assert sequence.rollout_logprobs.tolist() == [0, 0, -0.25, -0.25, -0.25, 0, -0.25]
    assert sequence.turn_ids.tolist() == [-1, -1, 0, 0, 0, 0, 1]
    assert sequence.policy_versions.tolist() == [-1, -1, 3, 3, 4, -1, 4]
    assert sequence.spans == (Span(2, 4, 3), Span(4, 5, 4), Span(6, 7, 4))
    assert (sequence.num_sampled_tokens, sequence.first_version, len(sequence)) == (4, 3, 7)


def test_an_update_mid_way_leaves_both_versions():
    builder = SequenceBuilder([1])
    sampled(builder, 2, 3, version=3)
    sampled(builder, 4, 5, version=4, fresh=False)
    assert builder.build().policy_versions[1:].tolist() == [3, 3, 4, 4]


def test_chunks_of_one_version_make_one_span_unless_their_cache_differs():
    builder = SequenceBuilder([1])
    sampled(builder, 2, version=3)
    sampled(builder, 3, version=3)
    sampled(builder, 4, version=3, fresh=False)
    assert builder.build().spans == (Span(1, 3, 3, True), Span(3, 4, 3, False))
    assert builder.num_sampled_tokens == 3


def test_tokens_the_framework_adds_are_not_sampled():
    builder = SequenceBuilder([1])
    sampled(builder, 2, version=0)
    builder.given([99], turn=0)
    sequence = builder.build()
    assert not sequence.loss_mask[-1]
    assert sequence.policy_versions[-1] == NOT_SAMPLED


@pytest.mark.parametrize("logprobs", [None, [], [-0.5], [-0.5] * 3])
def test_every_sampled_token_needs_a_logprob(logprobs):
    values = None if logprobs is None else np.array(logprobs, np.float32)
    with pytest.raises(ShapeError, match="2 sampled tokens came with"):
        SequenceBuilder([1]).sampled(np.array([5, 6], np.int32), logprobs=values, policy_version=0, kv_fresh=True, turn=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logprob_that_is_not_finite_is_refused(bad):
    with pytest.raises(NonFiniteError, match="sampled token 2"):
        SequenceBuilder([1]).sampled(np.array([5, 6], np.int32), logprobs=np.array([-1, bad], np.float32), policy_version=0, kv_fresh=True,
                                     turn=0)


def test_no_tokens_leave_no_span():
    builder = SequenceBuilder([1])
    sampled(builder, version=2)
    sequence = builder.build()
    assert (sequence.spans, sequence.first_version) == ((), NOT_SAMPLED)


@pytest.mark.parametrize(("change", "error"), [
    ({"turn_ids": np.zeros(2, np.int16)}, ShapeError),
    ({"records": TokenRecords(experts=np.zeros((2, 5, 1), np.int16))}, ShapeError),
    ({"records": TokenRecords(KeptSets.of([np.empty(0, np.int32), np.array([2, 5], np.int32), np.array([4], np.int32)]))}, ShapeError),
    ({"spans": (Span(1, 3, 0), Span(2, 3, 0))}, ShapeError),
    ({"spans": (Span(1, 4, 0),)}, ShapeError),
    ({"spans": (Span(1, 3, -1),)}, ShapeError),
    ({"spans": (Span(1, 2, 0),)}, ShapeError),
    ({"rollout_logprobs": np.array([0, np.nan, -1], np.float32)}, NonFiniteError),
])
def test_a_sequence_that_contradicts_itself_is_refused(change, error):
    parts = {"tokens": np.array([1, 2, 3], np.int32), "loss_mask": np.array([False, True, True]), "turn_ids": np.zeros(3, np.int16),
             "rollout_logprobs": np.array([0, -1, -1], np.float32), "spans": (Span(1, 3, 0),)}
    Sequence(**parts).check()
    with pytest.raises(error):
        Sequence(**(parts | change)).check()


def test_masking_keeps_the_tokens_and_their_versions():
    masked = two_turns().masked()
    assert not masked.loss_mask.any()
    assert masked.policy_versions.tolist() == two_turns().policy_versions.tolist()


def test_only_stop_and_length_are_without_error():
    assert {status for status in Status if not status.is_error} == {Status.STOP, Status.LENGTH}


def test_a_rollout_sums_its_sequences_and_rewards():
    rollout = Rollout("p", 0, 0, (two_turns(), two_turns()), Status.STOP, {"exact": 1.0, "format": 0.5})
    assert (rollout.num_tokens, rollout.first_version, rollout.reward) == (8, 3, 1.5)


def test_an_error_has_no_reward():
    rollout = Rollout("p", 0, 0, (), Status.REWARD_ERROR)
    assert np.isnan(rollout.reward)
    assert (rollout.num_tokens, rollout.first_version) == (0, NOT_SAMPLED)


def test_a_group_is_as_old_as_its_oldest_first_token_and_a_batch_lists_rollouts_group_by_group():
    young = SequenceBuilder([1])
    sampled(young, 2, version=9)
    rollouts = (Rollout("p", 0, 0, (young.build(),), Status.STOP), Rollout("p", 0, 1, (two_turns(),), Status.STOP),
                Rollout("p", 0, 2, (), Status.ENGINE_ERROR))
    group = RolloutGroup(0, Prompt(prompt_id="p"), rollouts)
    assert (group.first_version, group.num_tokens) == (3, 5)
    assert Batch(9, (group, group)).rollouts == rollouts + rollouts


@pytest.mark.parametrize(("change", "named"), [
    ({"top_p": 0.9}, "top_p"), ({"top_k": 20}, "top_k"), ({"min_p": 0.1}, "min_p"), ({"min_new_tokens": 1}, "min_new_tokens"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"), ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": 0.5}, "frequency_penalty")])
def test_sampling_that_biases_the_ratio_is_refused_for_training_alone(change, named):
    sampling = Sampling(**change)
    assert sampling.biased_fields() == (named,)
    sampling.check(for_training=False)
    with pytest.raises(ConfigError, match=f"sampling.{named}"):
        sampling.check(for_training=True)
    assert sampling.truncates == (named in ("top_p", "top_k", "min_p"))
    if sampling.truncates:
        sampling.check(for_training=True, kept_sets=True)
    else:
        with pytest.raises(ConfigError, match=f"sampling.{named}"):
            sampling.check(for_training=True, kept_sets=True)


@pytest.mark.parametrize("change", [{"temperature": 0.0}, {"temperature": float("nan")}, {"max_new_tokens": 0}, {"top_p": 0.0},
                                    {"top_p": 1.1}, {"top_k": 0}, {"min_p": -0.1}, {"min_p": float("nan")}])
def test_sampling_out_of_range_is_refused(change):
    with pytest.raises(ConfigError):
        Sampling(**change).check(for_training=False)


def test_temperature_and_stop_strings_are_no_bias():
    Sampling(temperature=0.6, stop=("</s>",), max_new_tokens=3).check(for_training=True)
