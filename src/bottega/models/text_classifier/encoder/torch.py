"""Text classifier from scratch: the language model's blocks with bidirectional attention and mean pooling.

B batch   T tokens   D hidden size   K classes
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bottega.models.decoder.torch import Block, RMSNorm, SequenceContext, compute_rotary_tables
from bottega.models.initial import initialise
from bottega.models.text_classifier.config import EncoderShape
from bottega.models.text_classifier.ngrams import build_wide_part


class TextClassifier(nn.Module):
    """Transformer encoder with mean pooling and a linear head.

    Rows are padded on the right; `mask` (B, T) is true for text, and padding has no influence.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape.block_shape) for _ in range(shape.num_layers))
        for block in self.layers:
            block.self_attn.dropout = shape.attention_dropout  # type: ignore[union-attr]
        self.norm = RMSNorm(shape.hidden_size, shape.block_shape.norm_epsilon)
        self.head = nn.Linear(shape.hidden_size, shape.num_labels)
        self.ngrams = build_wide_part(shape)
        self.checkpoint_blocks = False
        self.reset_buffers()

    def forward(self, ids: Tensor, mask: Tensor, *ngrams: Tensor) -> Tensor:
        """Return logits (B, K) of tokens `ids` (B, T); with a wide part, `ngrams` are the inputs of that."""
        logits = self.head(self._apply_dropout(self.features(ids, mask)))
        return logits if self.ngrams is None else logits + self.ngrams(*ngrams)

    def features(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the mean of the final hidden states of a text's tokens, (B, D)."""
        length = ids.shape[1]
        assert length <= self.shape.max_positions, f"{length} tokens exceed the {self.shape.max_positions} positions"
        # A row of padding alone attends to its first token, because a softmax over nothing is NaN.
        attended = mask | (torch.arange(length, device=ids.device) == 0)
        context = SequenceContext(
            self.cos[:length], self.sin[:length], attended[:, None, None, :], is_causal=False, stop=length
        )
        x = self.embedding(ids)
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) is torch.bfloat16:
            x = x.bfloat16()  # halves the traffic between blocks; the norms inside them stay float32
        x = self._apply_dropout(x)
        delta = 0 * x  # with a gradient, so that the first block uses the same compiled code as the others
        for block in self.layers:
            if self.checkpoint_blocks and self.training:
                x, delta = checkpoint(block, x, delta, context, use_reentrant=False, preserve_rng_state=True)
            else:
                x, delta = block(x, delta, context)
        # Selected rather than multiplied, because padding may have any value, also NaN.
        x = torch.where(mask[..., None], self.norm(x + delta), 0.0)
        return x.float().sum(1) / mask.sum(1, keepdim=True).clamp(min=1)

    def compile_blocks(self) -> None:
        """Compile the training forward of the blocks; all blocks share one compiled function, which accepts any length."""
        compiled = torch.compile(Block.compute, fullgraph=True, dynamic=True)
        for block in self.layers:
            assert isinstance(block, Block)
            block.compiled = compiled

    def reset_buffers(self) -> None:
        """Recompute the rotary tables on the device of the weights; they are not in the state dict."""
        cos, sin = compute_rotary_tables(self.shape.block_shape, self.norm.weight.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TextClassifier:
        # `to_empty` leaves buffers undefined and `to(bfloat16)` would round the angles, so both recompute them.
        super()._apply(fn, recurse)
        self.reset_buffers()
        return self

    def _apply_dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.shape.dropout, self.training) if self.shape.dropout else x


def initialise_encoder(module: TextClassifier, seed: int, *, residual_layers: int) -> None:
    """Initialise all parameters in place; a value depends only on the seed and the parameter's name and shape."""
    initialise(module, seed, residual_layers=residual_layers)
