"""What AReaL, slime, TRL, prime-rl, SkyRL, NeMo-RL and OpenRLHF set by default or recommend, as named corrections. No torch.

Sources: AReaL 1.0.4 (`api/cli_args.py`, `utils/functional/functional.py`, `trainer/ppo/actor.py`); slime's
`examples/train_infer_mismatch_helper/mis.py` and `backends/megatron_utils/loss.py`; TRL 1.16.0 (`trainer/grpo_trainer.py`); prime-rl's
`trainer/rl/loss.py`; SkyRL's `off_policy_correction_utils.py`; NeMo-RL's `algorithms/loss/loss_functions.py` and its guide to ProRLv2;
OpenRLHF 0.11.2 (`models/loss.py`, `cli/train_ppo_ray.py`).
"""

from __future__ import annotations

from dataclasses import replace

from asyncrl.correction.preset_spec import Preset, beside_its_origin
from asyncrl.correction.rules import Bounds, SecondMoment, geometric, kpop, opsm, outlier, veto

_CLIP = (("clip_low", 0.2), ("clip_high", 0.2))
"""The clip range of all of them by default."""
_YAO = "Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'"
_SPEED_KILLS = "Liu, Li et al. 2025, 'When speed kills stability'"
_ICEPOP = "IcePop, Ring-1T, 2510.18855"
_TIS, _MASK = ("oracle decoupled_ppo_token_tis",), ("oracle decoupled_ppo_token_mask_denominators",)
_SEQUENCE, _DECISIONS = ("oracle tis_sequence_product_and_geometric",), ("oracle rs_decisions",)
_NO_CLAMP = "it does not clamp ℓ: an overflow is infinite there, and cut all the same"

_AREAL = Preset(name="areal/decoupled", mask_high=5.0, loss_settings=_CLIP,
                origin="AReaL 1.0.4, actor.use_decoupled_loss with the defaults of rejection_sampling (token, mask, ratio, upper 5)",
                paper="AReaL, 2505.24298", departs="it takes an ℓ that is not finite for 0; ours refuses it", evidence=_MASK)
_SLIME = Preset(name="slime/tis", truncate_high=2.0, loss_settings=_CLIP, aggregation="seq_mean_token_mean",
                origin="slime, --use-tis (clip 0 to 2)", paper=_YAO, departs=_NO_CLAMP, evidence=_TIS)
_SLIME_MIS = replace(_SLIME, name="slime/mis_token_truncate", reject=(veto(),),
                     origin="slime, mis.py with mis.yaml: token, truncate at 2, veto 1e-4", departs="nothing known",
                     evidence=(*_TIS, "oracle veto_catastrophic_token"))
_TRL = Preset(name="trl/token_truncate", truncate_high=3.0, loss_settings=_CLIP,
              origin="TRL 1.16.0, vllm_importance_sampling_mode='token_truncate', clip_max 3, loss_type='dapo'", paper=_YAO,
              departs=f"{_NO_CLAMP}; a NaN sampling logprob gives ratio 1 there, and an error here", evidence=_TIS)
_SKYRL = Preset(name="skyrl/token_tis", truncate_high=2.0, loss_settings=_CLIP, origin="SkyRL, tis_ratio_type='token', clip 2", paper=_YAO,
                evidence=_TIS)
_NEMO = Preset(name="nemo_rl/tis", truncate_high=5.0, loss_settings=_CLIP,
               origin="NeMo-RL, truncated_importance_sampling_type='tis' at 5, as in its larger asynchronous recipes", paper=_YAO,
               departs="a weight that is not finite becomes 0 there; ours refuses the logprob behind it", evidence=_TIS)
_OPENRLHF = Preset(name="openrlhf/tis", truncate_low=0.5, truncate_high=5.0, loss_settings=_CLIP,
                   origin="OpenRLHF 0.11.2, is_correction_level='token', mode='clip', threshold 0.5 5", paper=_YAO, departs=_NO_CLAMP,
                   evidence=_TIS)

_ALL = (
    _AREAL,
    replace(_AREAL, name="areal/decoupled_unweighted", level="none", mask_high=None, evidence=_TIS,
            origin="AReaL 1.0.4, actor.use_decoupled_loss with rejection_sampling null: the weight is left out, which it warns of"),
    replace(_AREAL, name="areal/token_truncate", mask_high=None, truncate_high=5.0, evidence=_TIS,
            origin="AReaL 1.0.4, rejection_sampling: token, clamp, ratio, upper 5"),
    replace(_AREAL, name="areal/sequence_mask", level="sequence", reduce="mean", evidence=_SEQUENCE,
            origin="AReaL 1.0.4, rejection_sampling: sequence, mask, ratio, mean, upper 5"),
    replace(_AREAL, name="areal/sequence_truncate", level="sequence", reduce="mean", mask_high=None, truncate_high=5.0, evidence=_SEQUENCE,
            origin="AReaL 1.0.4, rejection_sampling: sequence, clamp, ratio, mean, upper 5"),
    replace(_AREAL, name="areal/kpop", mask_high=None, reject=(kpop(2.0),), paper="KPop", evidence=("oracle kpop_binary_kl",),
            origin="AReaL after 1.0.4, rejection_sampling: token, mask, binary_kl, upper 2"),
    replace(_AREAL, name="areal/m2po", level="none", mask_high=None, reject=(SecondMoment(limit=0.04),), denominator="kept",
            origin="AReaL 1.0.4, actor.m2_threshold 0.04 with use_decoupled_loss", paper="M2PO, 2510.01161",
            departs="it sorts and divides within each microbatch, ours over the whole batch", evidence=("oracle m2po_second_moment",)),
    replace(_AREAL, name="areal/loglinear", mask_high=None, truncate_high=5.0, proximal="log_linear", paper="A-3PO, 2512.06547",
            origin="AReaL 1.0.4, actor.prox_logp_method='loglinear' with rejection_sampling: token, clamp, upper 5",
            departs="it anchors at the version before the current one and counts a whole version for every update; ours at the version "
                    "the step starts from", evidence=("oracle prox_loglinear_by_version",)),

    _SLIME,
    replace(_SLIME, name="slime/icepop", truncate_high=None, mask_high=2.0, origin="slime, --use-tis with icepop_function (0 to 2)",
            paper=_ICEPOP, evidence=_MASK),
    _SLIME_MIS,
    replace(_SLIME_MIS, name="slime/mis_token_mask", truncate_high=None, mask_low=0.5, mask_high=2.0, paper=_SPEED_KILLS,
            origin="slime, mis.py: token, mask outside 0.5 to 2, veto 1e-4", evidence=(*_MASK, "oracle veto_catastrophic_token")),
    replace(_SLIME_MIS, name="slime/mis_token_clip", truncate_low=0.5, origin="slime, mis.py: token, clip to 0.5 to 2, veto 1e-4"),
    replace(_SLIME_MIS, name="slime/mis_sequence_truncate", level="sequence", paper=_SPEED_KILLS,
            origin="slime, mis.py: sequence (product), truncate at 2, veto 1e-4", evidence=(*_SEQUENCE, "oracle veto_catastrophic_token")),
    replace(_SLIME_MIS, name="slime/mis_geometric_mask", level="sequence", reduce="mean", truncate_high=None, mask_low=0.5, mask_high=2.0,
            paper=_SPEED_KILLS, origin="slime, mis.py: geometric, mask outside 0.5 to 2, veto 1e-4",
            evidence=(*_SEQUENCE, "oracle veto_catastrophic_token")),
    replace(_SLIME, name="slime/opsm", level="none", truncate_high=None, reject=(opsm(1e-4),), loss="ppo",
            origin="slime, --use-opsm (delta 1e-4) with --use-rollout-logprobs", paper="DeepSeek-V3.2, 2512.02556",
            departs="it measures the current policy in every microbatch, ours the one at the start of the step: equal in the first update",
            evidence=("oracle opsm_sequence_mask",)),

    _TRL,
    replace(_TRL, name="trl/token_mask", truncate_high=None, mask_high=3.0, evidence=_MASK, paper=_ICEPOP,
            origin="TRL 1.16.0, vllm_importance_sampling_mode='token_mask', clip_max 3, loss_type='dapo'"),
    replace(_TRL, name="trl/sequence_truncate", level="sequence", evidence=_SEQUENCE, paper=_SPEED_KILLS,
            origin="TRL 1.16.0, vllm_importance_sampling_mode='sequence_truncate', clip_max 3, loss_type='dapo'"),
    replace(_TRL, name="trl/sequence_mask", level="sequence", truncate_high=None, mask_high=3.0, evidence=_SEQUENCE, paper=_SPEED_KILLS,
            origin="TRL 1.16.0, its default: vllm_importance_sampling_mode='sequence_mask', clip_max 3, loss_type='dapo'"),

    Preset(name="prime_rl/dppo", level="none", loss="prime_rl_dppo", loss_settings=(("low", 0.2), ("high", 0.2), ("kl_tau", 1e-3)),
           origin="prime-rl, its default loss until IPO: dppo_mask_low and _high 0.2, kl_tau 1e-3", paper="DPPO, 2602.04879",
           evidence=("oracle prime_rl_default_and_ipo",)),
    Preset(name="prime_rl/ipo", level="none", loss="prime_rl_ipo", loss_settings=(("threshold", 0.1), ("kl_tau", 1e-3)),
           origin="prime-rl, loss type 'ipo' as it came: ipo_threshold 0.1, kl_tau 1e-3", paper="INTELLECT-3, 2512.16144",
           departs="later versions have a threshold of 0.3, no second term and a cap of 10,000 on the ratio",
           evidence=("oracle prime_rl_default_and_ipo",)),

    _SKYRL,
    replace(_SKYRL, name="skyrl/sequence_tis", level="sequence", truncate_high=5.0, origin="SkyRL, tis_ratio_type='sequence', clip 5",
            paper=_SPEED_KILLS, evidence=_SEQUENCE),
    replace(_SKYRL, name="skyrl/geometric_mask", level="none", truncate_high=None, reject=(geometric(low=0.99, high=1.01),),
            origin="SkyRL, sequence_mask_metric='geometric', 0.99 to 1.01", paper=_SPEED_KILLS, evidence=_DECISIONS),
    replace(_SKYRL, name="skyrl/product_mask", level="none", truncate_high=None, paper=_SPEED_KILLS, evidence=_DECISIONS,
            reject=(Bounds(statistic="ratio", level="sequence", reduce="sum", low=0.5, high=2.0),),
            origin="SkyRL, sequence_mask_metric='product', 0.5 to 2"),
    replace(_SKYRL, name="skyrl/outlier_mask", reject=(veto(1e-4), outlier(100.0)), evidence=(*_TIS, "oracle veto_catastrophic_token"),
            origin="SkyRL, tis_ratio_type='token' with outlier_token_is_threshold_low 1e-4 and _high 100, as it suggests"),

    _NEMO,
    replace(_NEMO, name="nemo_rl/icepop", truncate_high=None, mask_low=0.5, mask_high=5.0, paper=_ICEPOP, evidence=_MASK,
            origin="NeMo-RL, truncated_importance_sampling_type='icepop', 0.5 to 5"),
    replace(_NEMO, name="nemo_rl/seq_mask_tis", truncate_high=None, reject=(geometric(low=0.999, high=1.002),), paper=_SPEED_KILLS,
            origin="NeMo-RL, truncated_importance_sampling_type='seq-mask-tis', 0.999 to 1.002", evidence=("oracle seq_mask_tis",)),

    _OPENRLHF,
    replace(_OPENRLHF, name="openrlhf/icepop", truncate_low=None, truncate_high=None, mask_low=0.5, mask_high=5.0, paper=_ICEPOP,
            origin="OpenRLHF 0.11.2, is_correction_level='token', mode='mask', threshold 0.5 5", evidence=_MASK),
    replace(_OPENRLHF, name="openrlhf/seq_mask_tis", truncate_low=None, truncate_high=None, reject=(geometric(low=0.5, high=5.0),),
            paper=_SPEED_KILLS, origin="OpenRLHF 0.11.2, is_correction_level='seq', mode='mask', threshold 0.5 5",
            evidence=("oracle seq_mask_tis",)),
)
PEERS = tuple(beside_its_origin(known) if known.name.startswith(("areal/", "trl/")) and known.name != "areal/kpop" else known
              for known in _ALL)
"""The projects that install from PyPI are asked themselves; KPop came to AReaL after 1.0.4."""
