"""How many tokens a request's prompt has, estimated from its body before anybody has read it."""

from __future__ import annotations

from viiwork.core.turn import Usage
from viiwork.limits import (
    BYTES_PER_TOKEN,
    BYTES_PER_TOKEN_ALPHA,
    BYTES_PER_TOKEN_MAX,
    BYTES_PER_TOKEN_MIN,
    CAPACITY_MODELS_MAX,
    ESTIMATE_TOKENS_MIN,
)


class PromptSizes:
    """Bytes a token of each model, learnt from the answers' token counts."""

    def __init__(self) -> None:
        self._bytes: dict[str, float] = {}

    def n_tokens(self, model: str, body_bytes: int) -> int:
        return int(body_bytes / self._bytes.get(model, BYTES_PER_TOKEN))

    def learn(self, model: str, body_bytes: int, usage: Usage | None) -> None:
        """Take over what an answer says about the prompt of so many bytes."""
        if usage is None or usage.cached is None or usage.prefilled is None:
            return
        n_tokens = usage.cached + usage.prefilled
        if n_tokens < ESTIMATE_TOKENS_MIN:
            return  # of a short body the frame is most
        # A picture has megabytes and few tokens; it must not make the next text look short.
        seen = min(max(body_bytes / n_tokens, BYTES_PER_TOKEN_MIN), BYTES_PER_TOKEN_MAX)
        known = self._bytes.get(model)
        if known is None:
            known = BYTES_PER_TOKEN
            if len(self._bytes) >= CAPACITY_MODELS_MAX:
                del self._bytes[next(iter(self._bytes))]
        self._bytes[model] = known + BYTES_PER_TOKEN_ALPHA * (seen - known)
