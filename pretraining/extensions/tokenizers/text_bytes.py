"""Bytes of the text that trained tokens stand for, so that losses of different tokenizers can be compared."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from pretraining.config.errors import UserError
from pretraining.data.stores.labels import IGNORED
from pretraining.extensions.tokenizers.tokenizer import open_tokenizer


class ByteCounter:
    """Counts UTF-8 bytes of the text that was tokenized, after the tokenizer's own normalization.

    Special tokens (the tokenizer's, and those that the configuration puts around documents and sequences) and the
    unknown token count 0 bytes; their losses count. The space that some tokenizers add to the first token of a text is
    not counted where the text begins after a special token.
    """

    def __init__(self, path: str, special: Collection[int], has_bol: bool = False) -> None:
        """path: of the tokenizer. special: ids that stand for no text. Raises UserError.

        has_bol: the first token of every row is bol_token, after which the text of most rows goes on.
        """
        tokenizer = open_tokenizer(path)
        self._path = path
        self._lengths = np.array(tokenizer.byte_lengths(), np.int64)  # [V], by id
        self._special = np.array([id for id in special if id < len(self._lengths)], np.int64)
        self._lengths[self._special] = 0
        self._adds_space, self._first = tokenizer.adds_space(), int(has_bol)

    def count(self, tokens: np.ndarray, labels: np.ndarray) -> int:
        """Return the bytes of the trained labels; both are int32 [rows, T]. Raises UserError for an unknown id."""
        trained = labels[labels != IGNORED]
        if trained.size and int(trained.max()) >= len(self._lengths):
            has = f"has {len(self._lengths):,} ids, but the data have {int(trained.max())}"
            raise UserError(f"--tokenizer_path={self._path}: {has}; give the tokenizer that made the tokens")
        total = int(self._lengths[trained].sum())
        if self._adds_space:
            begins = np.isin(tokens, self._special) & (labels != IGNORED)
            begins[:, : self._first] = False
            total -= int(np.count_nonzero(self._lengths[labels[begins]]))
        return total
