"""verl's nineteen rollout corrections, each by the name of the function that makes its configuration.

What they do is read from verl 0.9.1: `trainer/config/algorithm.py` for the settings, `trainer/ppo/rollout_corr_helper.py` for weights
and rejection, `trainer/ppo/core_algos.py` for the losses. Where weights and rejection are computed before the step ("decoupled"),
rejected tokens leave the response mask, and with it the denominator; where the loss computes them ("bypass"), they stay in it.
"""

from __future__ import annotations

from dataclasses import replace

from asyncrl.correction.preset_spec import Preset, beside_its_origin
from asyncrl.correction.rules import Bounds, geometric

_PPO = (("clip_low", 0.2), ("clip_high", 0.2), ("dual_clip", 3.0))
"""verl's defaults: one clip range both ways, and a dual clip."""
_EACH_MICROBATCH = ("verl weighs and rejects in every microbatch, by the current logprobs; ours once a step, by those at its start: equal "
                    "in the first update")
_INVERTED = ("verl documents bounds on the geometric mean ratio and lays their logarithms on −mean ℓ, which bounds its inverse; ours keeps "
             "what its code keeps, 1/1.001 to 1/0.999")
_SPEED_KILLS = "Liu, Li et al. 2025, 'When speed kills stability'"

_GEO = geometric(low=1 / 1.001, high=1 / 0.999)
_K3 = Bounds(statistic="k3", level="sequence", reduce="mean", high=0.01)
_PRODUCT = Bounds(statistic="ratio", level="sequence", reduce="sum", low=0.5, high=2.0)


def _origin(name: str) -> str:
    return f"verl 0.9.1, RolloutCorrectionConfig.{name}()"


_TOKEN_IS = Preset(name="verl/decoupled_token_is", truncate_high=2.0, loss_settings=_PPO, origin=_origin("decoupled_token_is"),
                   paper="Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'",
                   evidence=("oracle decoupled_ppo_token_tis", "oracle dual_clip_and_clip_higher"))
_SEQ_IS = replace(_TOKEN_IS, name="verl/decoupled_seq_is", level="sequence", origin=_origin("decoupled_seq_is"), paper=_SPEED_KILLS,
                  evidence=("oracle tis_sequence_product_and_geometric", "oracle dual_clip_and_clip_higher"))
_GEO_RS = Preset(name="verl/decoupled_geo_rs", level="none", reject=(_GEO,), denominator="kept", loss_settings=_PPO,
                 origin=_origin("decoupled_geo_rs"), paper=_SPEED_KILLS, departs=_INVERTED,
                 evidence=("oracle rs_decisions", "oracle rs_estimators_token_and_sequence"))
_K3_RS = replace(_GEO_RS, name="verl/decoupled_k3_rs", reject=(_K3,), origin=_origin("decoupled_k3_rs"), departs="nothing known")
_BYPASS = Preset(name="verl/bypass_ppo_clip", level="none", loss="ppo", loss_settings=_PPO, origin=_origin("bypass_ppo_clip"),
                 paper="1707.06347", evidence=("oracle identity_prox_equals_behave", "oracle dual_clip_and_clip_higher"))
_BYPASS_GEO_RS = replace(_BYPASS, name="verl/bypass_ppo_clip_geo_rs", reject=(_GEO,), origin=_origin("bypass_ppo_clip_geo_rs"),
                         paper=_SPEED_KILLS, departs=f"{_EACH_MICROBATCH}; {_INVERTED}", evidence=_GEO_RS.evidence)
_PG_IS = Preset(name="verl/bypass_pg_is", level="sequence", truncate_high=2.0, loss="reinforce", origin=_origin("bypass_pg_is"),
                paper=_SPEED_KILLS, departs=_EACH_MICROBATCH, evidence=("oracle tis_sequence_product_and_geometric",))
_PG_GEO_RS = replace(_PG_IS, name="verl/bypass_pg_geo_rs", level="none", truncate_high=None, reject=(_GEO,),
                     origin=_origin("bypass_pg_geo_rs"), departs=_BYPASS_GEO_RS.departs, evidence=_GEO_RS.evidence)

VERL = tuple(map(beside_its_origin, (
    _TOKEN_IS,
    _SEQ_IS,
    Preset(name="verl/decoupled_token_icepop", mask_low=0.5, mask_high=5.0, loss_settings=_PPO, origin=_origin("decoupled_token_icepop"),
           paper="IcePop, Ring-1T, 2510.18855", evidence=("oracle decoupled_ppo_token_mask_denominators",)),
    replace(_SEQ_IS, name="verl/decoupled_seq_is_rs", reject=(_PRODUCT,), denominator="kept", origin=_origin("decoupled_seq_is_rs"),
            departs="none in these bounds: verl lays their logarithms on −Σ ℓ, and 0.5 and 2 are each other's inverse",
            evidence=("oracle tis_sequence_product_and_geometric", "oracle rs_decisions")),
    _GEO_RS,
    _BYPASS,
    _BYPASS_GEO_RS,
    replace(_BYPASS_GEO_RS, name="verl/bypass_ppo_clip_k3_rs", reject=(_K3,), origin=_origin("bypass_ppo_clip_k3_rs"),
            departs=_EACH_MICROBATCH),
    _PG_IS,
    replace(_PG_IS, name="verl/bypass_pg_token_icepop", level="token", truncate_high=None, mask_low=0.5, mask_high=5.0,
            origin=_origin("bypass_pg_token_icepop"), paper="IcePop, Ring-1T, 2510.18855",
            evidence=("oracle decoupled_ppo_token_mask_denominators",)),
    _PG_GEO_RS,
    replace(_GEO_RS, name="verl/decoupled_geo_rs_seq_tis", level="sequence", truncate_high=2.0, origin=_origin("decoupled_geo_rs_seq_tis"),
            evidence=("oracle tis_sequence_product_and_geometric", "oracle rs_decisions")),
    replace(_GEO_RS, name="verl/decoupled_geo_rs_token_tis", level="token", truncate_high=2.0,
            origin=_origin("decoupled_geo_rs_token_tis"), evidence=("oracle decoupled_ppo_token_tis", "oracle rs_decisions")),
    replace(_PG_GEO_RS, name="verl/bypass_pg_geo_rs_seq_tis", level="sequence", truncate_high=2.0,
            origin=_origin("bypass_pg_geo_rs_seq_tis"), evidence=("oracle tis_sequence_product_and_geometric", "oracle rs_decisions")),
    replace(_PG_GEO_RS, name="verl/bypass_pg_geo_rs_token_tis", level="token", truncate_high=2.0,
            origin=_origin("bypass_pg_geo_rs_token_tis"), evidence=("oracle decoupled_ppo_token_tis", "oracle rs_decisions")),
    _K3_RS,
    replace(_K3_RS, name="verl/decoupled_k3_rs_seq_tis", level="sequence", truncate_high=2.0, origin=_origin("decoupled_k3_rs_seq_tis"),
            evidence=("oracle tis_sequence_product_and_geometric", "oracle rs_decisions")),
    replace(_K3_RS, name="verl/decoupled_k3_rs_token_tis", level="token", truncate_high=2.0, origin=_origin("decoupled_k3_rs_token_tis"),
            evidence=("oracle decoupled_ppo_token_tis", "oracle rs_decisions")),
    Preset(name="verl/disabled", level="none", loss_settings=_PPO, origin=_origin("disabled"), paper="1707.06347",
           evidence=("oracle decoupled_ppo_token_tis", "oracle dual_clip_and_clip_higher")),
)))
