"""Any Hugging Face causal LM behind one call: ids, positions, mask, cache -> logits or hidden states.

Models that cannot verify a draft (because their state cannot be rolled back, or their attention takes no mask of
ours) are refused when they are wrapped, before the first forward.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.cache import KVCache
from jacobi_forcing.errors import ModelError
from jacobi_forcing.packed import check_packed, is_packed
from jacobi_forcing.peft_models import plain
from jacobi_forcing.refusals import refuse_unfit

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskLike: TypeAlias = "Tensor | BlockMask | dict[str, Tensor] | dict[str, BlockMask]"

FLEX_SHAPES = 64
"""Kernels that may be compiled for one model; behind the limit torch would run an uncompiled one that needs L x L."""


class Backbone:
    """A decoder-only model as this package sees it.

    Args:
        model: A model with a language-modelling head, in the dtype and on the device it is to run on; peft's wrapper is
            looked through.

    Attributes:
        adapter: The model's gated adapter, if it has one: then it drafts, and the base verifies.

    Raises:
        CacheError: Its layers keep a state that cannot be rolled back (linear attention, state space, chunked).
        ModelError: It is an encoder-decoder, takes no positions or masks, or its attention kernel takes no mask.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        model = plain(model)
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        refuse_unfit(model)
        check_packed(model)
        self.windows = _windows(self.config)
        self.adapter = GatedAdapter.of(model)
        # The library looks through all weights each time it is asked for their dtype; every sweep asks.
        self._weight = next(weight for weight in model.parameters() if weight.is_floating_point())
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self._weight.dtype

    @property
    def packed_weights(self) -> bool:
        """Whether linear layers multiply with packed weights, see `packed.pack_weights`."""
        return is_packed(self.model)

    @property
    def vocab_size(self) -> int:
        """Rows of the output head; a tokenizer may use fewer."""
        return int(self.config.vocab_size)

    @property
    def context_length(self) -> int | None:
        """Most positions the model was made for, or None when its config does not say."""
        value = getattr(self.config, "max_position_embeddings", None)
        return int(value) if value else None

    @property
    def rope_boundary(self) -> int | None:
        """Length at which the rotary embedding of all positions changes (LongRoPE), tokens; None where there is none.

        Texts on either side of it are computed differently, those before it anew once it is passed.
        """
        rope = getattr(self.config, "rope_parameters", None) or getattr(self.config, "rope_scaling", None) or {}
        kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
        if not any(kind.get("rope_type", kind.get("type")) == "longrope" for kind in kinds):
            return None
        own = next((kind.get("original_max_position_embeddings") for kind in kinds), None)
        return int(own or getattr(self.config, "original_max_position_embeddings", None) or self.context_length or 0)

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end a text, from the generation config, then the model's config."""
        generation = getattr(self.model, "generation_config", None)
        for source in (generation, self.config):
            value = getattr(source, "eos_token_id", None)
            if value is not None:
                return as_ids(value)
        return []

    def new_cache(self, rows: int = 1, capacity: int | None = None) -> KVCache:
        """An empty cache for `rows` rows, of fixed size if a capacity is given."""
        return KVCache(rows, capacity, tame=self.adapter is not None)

    def attention_mask(self, visible: Tensor, q_positions: Tensor, kv_positions: Tensor) -> MaskLike:
        """Turn what may be seen into what the model's layers take.

        Args:
            visible: bool [R, Q, K], True where the query may look.
            q_positions: [R, Q].
            kv_positions: [R, K].

        Returns:
            An additive mask [R, 1, Q, K] in the model's dtype, or one for each kind of layer where kinds are mixed.
            Additive, because SDPA copies a bool mask per layer under autograd and eager attention adds it as 0 and 1.
        """
        masks: dict[str, Tensor] = {}
        for kind, window in self.windows.items():
            seen = visible
            if window is not None:
                seen = visible & (q_positions[:, :, None] - kv_positions[:, None, :] < window)
            masks[kind] = additive(seen, self.dtype)[:, None]
        return _one_or_all(masks)

    def causal_mask(self, queries: int, cache: KVCache) -> MaskLike | None:
        """What `attention_mask` gives for lines of `queries` tokens right behind all that is committed.

        The same values from two small operations: a sweep of a few tokens notices the difference.

        Returns:
            A mask [1, 1, queries, columns of the cache], or one for each kind of layer where kinds are mixed. None
            where the library needs none either, because nothing is committed or the only query sees every key;
            buffers of fixed size always need one.
        """
        committed, columns = cache.width, cache.columns(queries)
        sees_all = queries == 1 and all(window is None or window > committed for window in self.windows.values())
        if cache.capacity is None and (committed == 0 or sees_all):
            return None
        lowest = torch.full((1, 1, queries, columns), torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device)
        masks: dict[str, Tensor] = {}
        for kind, window in self.windows.items():
            masks[kind] = lowest.triu(committed + 1)
            if window is not None:
                masks[kind] += lowest.tril(committed - window)
        return _one_or_all(masks)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: MaskLike | None,
        cache: KVCache | None = None,
        keep: Tensor | None = None,
        gated: Tensor | slice | None = None,
    ) -> Tensor:
        """Logits of one forward pass.

        Args:
            ids: [R, Q].
            positions: [R, Q].
            mask: From `attention_mask`, or None for plain causal attention without a cache.
            cache: Receives the KV of `ids` as pending slots.
            keep: Columns whose logits are wanted, [k]; all by default.
            gated: Tokens that run through the gated adapter, counted through all rows [G] or a slice; none by default.

        Returns:
            Logits [R, Q or k, V].
        """
        if gated is not None and self.adapter is not None:
            with self.adapter.gated(gated):
                return self.forward(ids, positions, mask, cache, keep)
        extra: dict[str, Any] = {"logits_to_keep": keep} if keep is not None and self._keeps_logits else {}
        library = cache.library if cache is not None else None
        logits = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            cache=library,
            use_cache=cache is not None,
            **extra,
        ).logits
        return logits if keep is None or self._keeps_logits else logits[:, keep]

    @property
    def runs_flex(self) -> bool:
        """Whether the model can run FlexAttention; the library tells it in a private name only."""
        return bool(getattr(self.model, "_supports_flex_attn", False))

    @contextlib.contextmanager
    def flex(self) -> Iterator[None]:
        """Let the model run FlexAttention inside the block; what decodes outside of it runs what it ran before.

        Each shape gets a kernel of its own: left to itself, torch makes the second one for any shape, which is slower
        and on a CPU does not compile. These switches of torch have no public name.
        """
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("flex_attention")
        try:
            with torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=FLEX_SHAPES):
                yield
        finally:
            self.model.set_attn_implementation(before)

    def hidden(self, ids: Tensor, positions: Tensor, mask: MaskLike | None, cache: Cache | None = None) -> Tensor:
        """Final hidden states [R, Q, H]; gradients flow. For losses that make logits in chunks.

        Args:
            ids: [R, Q].
            positions: [R, Q].
            mask: See `forward`.
            cache: The library's, where what stands before `ids` has its KV, and into which theirs goes.
        """
        extra = {} if cache is None else {"cache": cache}
        out = self.model.base_model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=cache is not None, **extra
        )
        return out.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H], as the model's own forward makes them."""
        logits = self.model.get_output_embeddings()(hidden)
        scale = getattr(self.config, "logit_scale", None)
        if scale is not None:
            logits = logits * scale
        divisor = getattr(self.config, "logits_scaling", None)
        if divisor is not None:
            logits = logits / divisor
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def verify_head(self) -> None:
        """Check on three tokens that `hidden` and `logits` together equal the model's forward.

        Raises:
            ModelError: They differ: the model does something between hidden states and logits that is not known here.
        """
        training = self.model.training
        self.model.eval()
        ids = torch.arange(3, device=self.device)[None] % self.vocab_size
        positions = torch.arange(3, device=self.device)[None]
        ours = self.logits(self.hidden(ids, positions, None)).float()
        theirs = self.forward(ids, positions, None).float()
        self.model.train(training)
        if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3):
            raise ModelError(
                "The model changes its logits in a way that is not known here",
                seen=f"largest difference {(ours - theirs).abs().max().item():.3g}",
                remedy="losses in chunks would be wrong; please report the architecture",
            )


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, the dtype's lowest value elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def _one_or_all(masks: dict[str, Tensor]) -> MaskLike:
    """A model whose layers are all alike takes a plain mask, one that mixes kinds takes them by name."""
    return masks if len(masks) > 1 else next(iter(masks.values()))


def as_ids(value: int | Sequence[int] | Tensor | None) -> list[int]:
    """One id, several, or none, as a list."""
    if value is None:
        return []
    if isinstance(value, Tensor):
        return [int(item) for item in value.flatten().tolist()]
    return [int(value)] if isinstance(value, int) else [int(item) for item in value]


def _windows(config: Any) -> dict[str, int | None]:
    """The sliding window (None: unlimited) of each kind of layer."""
    layers = DynamicCache(config=config).layers
    kinds: dict[str, int | None] = {}
    for layer in layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            kinds["sliding_attention"] = int(layer.sliding_window)
        else:
            kinds["full_attention"] = None
    return kinds or {"full_attention": None}
