"""Text classifier from scratch: the language model's blocks with bidirectional attention and mean pooling.

B batch   T tokens   D hidden size   K classes
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bottega.models.decoder.config import MLP_RATIO, TransformerShape
from bottega.models.decoder.torch import Block, RMSNorm, SequenceContext, compute_rotary_tables
from bottega.models.initial import initialise
from bottega.models.text_classifier.config import EncoderShape


class TextClassifier(nn.Module):
    """A text stands at the beginning of its row; `mask` [B, T] is true where it is, and what fills it up is never seen."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.inner = block_shape(shape)
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(self.inner) for _ in range(shape.num_layers))
        for block in self.layers:
            block.self_attn.dropout = shape.attention_dropout  # type: ignore[union-attr]
        self.norm = RMSNorm(shape.hidden_size, self.inner.norm_epsilon)
        self.head = nn.Linear(shape.hidden_size, shape.num_labels)
        self.checkpoint_blocks = False
        self.reset_buffers()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits [B, K] of tokens [B, T]."""
        return self.head(self._drop(self.features(ids, mask)))

    def features(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[B, D]: the mean over the text's tokens of what each has become."""
        length = ids.shape[1]
        assert length <= self.shape.max_positions, f"{length} tokens exceed the {self.shape.max_positions} positions"
        # A row of padding alone would be a mean over nothing, which attention answers with NaN: it sees its first token.
        seen = mask | (torch.arange(length, device=ids.device) == 0)
        window = SequenceContext(
            self.cos[:length], self.sin[:length], seen[:, None, None, :], causal=False, stop=length
        )
        x = self.embedding(ids)
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) is torch.bfloat16:
            x = x.bfloat16()  # halves the traffic between blocks; the norms inside them stay float32
        x = self._drop(x)
        added = 0 * x  # as large as the others and with a gradient, so that one compiled block serves the first one too
        for block in self.layers:
            if self.checkpoint_blocks and self.training:
                x, added = checkpoint(block, x, added, window, use_reentrant=False, preserve_rng_state=True)
            else:
                x, added = block(x, added, window)
        # Selected rather than multiplied: what fills up a row is of any value.
        x = torch.where(mask[..., None], self.norm(x + added), 0.0)
        return x.float().sum(1) / mask.sum(1, keepdim=True).clamp(min=1)

    def compile_blocks(self) -> None:
        """Compile the training forward of the blocks, once for all. Texts differ in length from batch to batch."""
        compiled = torch.compile(Block.compute, fullgraph=True, dynamic=True)
        for block in self.layers:
            assert isinstance(block, Block)
            block.compiled = compiled

    def reset_buffers(self) -> None:
        """The rotary tables again, on the device where the weights now are. They are in no state dict."""
        cos, sin = compute_rotary_tables(self.inner, self.norm.weight.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TextClassifier:
        # `to_empty` leaves buffers undefined and `to(bfloat16)` would round the angles, so both recompute them.
        super()._apply(fn, recurse)
        self.reset_buffers()
        return self

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.shape.dropout, self.training) if self.shape.dropout else x


def block_shape(shape: EncoderShape) -> TransformerShape:
    """Of the language model whose blocks these are."""
    return TransformerShape(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_heads,
        head_size=shape.hidden_size // shape.num_heads,
        intermediate_size=MLP_RATIO * shape.hidden_size,
        vocab_size=shape.vocab_size,
        context=shape.max_positions,
        dropout=shape.dropout,
    )


def initialise_encoder(module: TextClassifier, seed: int) -> None:
    """Set every parameter of a module that has memory, on any device. Only its own name and shape decide a value."""
    initialise(module, seed, residual_layers=module.shape.num_layers)
