"""A language model on torch's LSTM: embedding, recurrent layers, linear head."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from paredown.models.tokens import Scored, scored


@final
class LSTMModel(nn.Module):
    """Tokens to the logits of the next one."""

    def __init__(self, *, vocabulary: int = 10_000, dim: int = 512, num_layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.lstm = nn.LSTM(dim, dim, num_layers, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor | Scored:
        """Logits (num_texts, length, vocabulary) of tokens (num_texts, length); with `targets` the loss too, as `.loss`."""
        hidden, _ = self.lstm(self.dropout(self.tokens(ids)))
        return scored(self.head(self.dropout(hidden)), targets)
