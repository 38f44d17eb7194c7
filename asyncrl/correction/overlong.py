"""A penalty for completions that come near the token limit. NumPy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.errors import ConfigError, NonFiniteError


def overlong_penalty(lengths: ArrayLike, *, max_tokens: int, cache_tokens: int, unclamped: bool = False) -> NDArray[np.float64]:
    """[N] soft overlong punishment, to be added to the rewards before any baseline. DAPO, 2503.14476, equation 13.

        0                                          up to max_tokens − cache_tokens
        (max_tokens − cache_tokens − l) / cache_tokens   up to max_tokens
        −1                                         beyond

    The paper's rewards are −1 and 1; with rewards 0 and 1 half of it weighs as much. `unclamped` goes on falling beyond `max_tokens`,
    as verl 0.9.1 does: a rollout that is one cache over the limit then gets −2.

    Args:
        lengths: [N] tokens the policy sampled.
        max_tokens: where the penalty is whole.
        cache_tokens: over how many tokens before that it grows.
        unclamped: verl's form instead of the paper's.

    Raises ConfigError for limits that cannot be, NonFiniteError for a length that is NaN or infinite.
    """
    if not 1 <= cache_tokens <= max_tokens:
        raise ConfigError("max_tokens, cache_tokens", value=(max_tokens, cache_tokens), allowed="1 ≤ cache_tokens ≤ max_tokens",
                          remedy="The penalty grows over the last cache_tokens of max_tokens; DAPO has 4096 of 20480.")
    tokens = np.asarray(lengths, np.float64)
    bad = np.flatnonzero(~np.isfinite(tokens))
    if len(bad):
        raise NonFiniteError(f"lengths[{bad[0]}] = {tokens.flat[bad[0]]}: a rollout has a number of tokens")
    falling = np.minimum((max_tokens - cache_tokens - tokens) / cache_tokens, 0.0)
    return falling if unclamped else np.maximum(falling, -1.0)
