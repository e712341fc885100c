"""The line of answered questions."""

from __future__ import annotations

import pytest

pytest.importorskip("pretraining.extensions.tokenizers")

from main_training import configure
from pretraining.config.errors import ConfigError
from pretraining.extensions.questions.watch import questions_line


def test_questions_have_a_line_with_the_accuracies_of_each_file() -> None:
    figures = {"eval_acc/a": 0.5, "eval_acc_norm/a": 0.25, "eval_acc/b": 1.0, "eval_acc_norm/b": 0.75}
    line = questions_line({"step": 80, **figures, "eval_seconds": 2.0}, 160)
    assert line == "step  80/160  50.0%  accuracy (normalized)  a 0.5000 (0.2500)  b 1.0000 (0.7500)"


@pytest.mark.parametrize("flags", [{}, {"eval_tasks": "q.jsonl"}])
def test_without_questions_or_their_tokenizer_one_thing_is_asked_for(flags: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^1 problem") as refused:
        configure({"eval_interval": "10", "use_dummy_dataset": "True", "model_variant": "tiny", **flags})
    assert f"needs --{'tokenizer_path' if flags else 'eval_tasks'}" in str(refused.value)
