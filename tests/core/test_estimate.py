from __future__ import annotations

import pytest

from viiwork.core.estimate import PromptSizes
from viiwork.core.turn import Usage
from viiwork.limits import CAPACITY_MODELS_MAX


def test_four_bytes_are_a_token_until_answers_tell_better():
    sizes = PromptSizes()
    assert sizes.n_tokens("m", 4000) == 1000
    for _ in range(80):
        sizes.learn("m", 6000, Usage(cached=900, prefilled=100))
    assert sizes.n_tokens("m", 6000) == pytest.approx(1000, rel=0.01)
    assert sizes.n_tokens("other", 4000) == 1000


def test_answers_without_counts_and_of_short_prompts_teach_nothing():
    sizes = PromptSizes()
    for usage in (None, Usage(), Usage(cached=5), Usage(cached=0, prefilled=20)):
        sizes.learn("m", 4000, usage)
    assert sizes.n_tokens("m", 4000) == 1000


def test_a_picture_does_not_make_texts_look_short():
    sizes = PromptSizes()
    sizes.learn("m", 5_000_000, Usage(cached=0, prefilled=300))
    assert sizes.n_tokens("m", 4000) > 700


def test_models_beyond_the_limit_are_forgotten_the_oldest_first():
    sizes = PromptSizes()
    for n in range(CAPACITY_MODELS_MAX + 1):
        sizes.learn(f"m{n}", 8000, Usage(cached=0, prefilled=1000))
    assert sizes.n_tokens("m0", 4000) == 1000
    assert sizes.n_tokens("m1", 4000) < 1000
