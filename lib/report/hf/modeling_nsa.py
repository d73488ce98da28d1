"""A language model with Native Sparse Attention (arXiv 2502.11089) for Hugging Face's transformers, in plain PyTorch.

`./train_nsa export` writes this file. It computes what train_nsa's dev/MODEL.md specifies, with the same names; "step"
and "Eq." are numbers there and in the paper. Shapes: B sequences, N new tokens, S tokens so far (those of the cache
and the new ones), C width, G groups of h heads, D head dimension, NC compressed blocks, l, d, l', n, w as in NsaConfig.
"""

import copy
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .configuration_nsa import NsaConfig

QUERIES_AT_A_TIME = 256  # the weights of so many queries are in memory at once, so memory grows linearly with S
SMALLEST_WEIGHT = math.exp(-87)  # the trainer takes smaller ones, where fp32 loses precision, as 0: so blocks tie alike
# By this name Trainer's label smoothing knows that a label stands at the position before it
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("nsa", "NsaForCausalLM")
# What transformers calls the cache: the former since 5.24, where a model that knows the latter alone gets none
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class NsaCache:
    """What decoding keeps of the tokens so far."""

    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    def __init__(self, layers):
        self.tokens = 0
        self.last = None  # the embedding of the last token [B, 1, C], for the smear
        # Per layer, by name: k_win, v_win, k_slc, v_slc [B, G, S, D], compressed k_cmp, v_cmp [B, G, NC, D], and the
        # rows that the next compressed block will be made of, k_rows, v_rows [B, G, below l, D].
        self.layers = [{} for _ in range(layers)]

    def get_seq_length(self, layer=0):
        return self.tokens

    def append(self, layer, name, new):
        """new [B, G, N, D] -> all of that name, the new ones last."""
        before = self.layers[layer].get(name)
        self.layers[layer][name] = new if before is None else torch.cat([before, new], dim=2)
        return self.layers[layer][name]

    def chosen(self, rows):
        """A cache of these rows of the batch."""
        other = copy.copy(self)
        if self.last is not None:
            other.last = self.last.index_select(0, rows.to(self.last.device))
        other.layers = [{name: x.index_select(0, rows.to(x.device)) for name, x in y.items()} for y in self.layers]
        return other

    def reorder_cache(self, beams):
        self.__dict__ = self.chosen(beams).__dict__


class NsaRowCaches:
    """The same for sequences of which each has as many tokens as its attention_mask shows: a cache for each."""

    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    def __init__(self, rows, columns=0):
        self.rows, self.columns = rows, columns  # columns: of input_ids so far, padding included

    def get_seq_length(self, layer=0):
        return self.columns

    def reorder_cache(self, beams):
        self.rows = [self.rows[b].chosen(torch.tensor([0])) for b in beams.tolist()]


def rope_angles(positions, config, device):
    """cos and sin [positions, D/2] of position * base^(-2i/D); in fp64, since positions grow large."""
    i = torch.arange(config.head_dim // 2, dtype=torch.float64)
    angle = positions.double()[:, None] * config.rope_base ** (-2 * i / config.head_dim)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rope(x, angles):
    """Step 2: rotates x [..., N, D]; element i is paired with i + D/2."""
    cos, sin = angles
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def attend(q, k, v, visible):
    """Softmax attention. q [B, G, h, N, D], k, v [B, G, S, D], visible [B or 1, G or 1, N, S] -> outputs [B, G, h,
    N, D] and weights [B, G, h, N, S]. A query that sees no key has weights 0 and output 0."""
    visible = visible[:, :, None]
    scores = (q @ k[:, :, None].transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    p = torch.softmax(scores, dim=-1) * visible
    p = p.masked_fill(p < SMALLEST_WEIGHT, 0)
    return p.to(v.dtype) @ v[:, :, None], p


def compressed_blocks(tokens, c):
    """NC, how many compressed blocks so many tokens have."""
    return 0 if tokens < c.cmp_block else (tokens - c.cmp_block) // c.cmp_stride + 1


def overlap(blocks, selection_blocks, c, device):
    """[NC, blocks]: the tokens that compressed block i and selection block j share, divided by d. Eq. (9)"""
    i = torch.arange(blocks, device=device)[:, None] * c.cmp_stride
    j = torch.arange(selection_blocks, device=device) * c.slc_block
    shared = torch.minimum(i + c.cmp_block, j + c.slc_block) - torch.maximum(i, j)
    return shared.clamp(min=0).float() / c.cmp_stride


def select(importance, t, c):
    """Step 6: importance [B, G, N, blocks] of the queries at positions t -> bool: the forced blocks {0, b-1, b} and
    the best others, n in all. No block ahead of the query; of equal ones the lower."""
    j, b = torch.arange(importance.shape[-1], device=t.device), t[:, None] // c.slc_block
    seen = j <= b
    forced = ((j == 0) | (j == b - 1) | (j == b)) & seen
    order = importance.masked_fill(forced, math.inf).masked_fill(~seen, -math.inf)
    best = order.sort(dim=-1, descending=True, stable=True).indices[..., : c.slc_count]
    return torch.zeros_like(importance, dtype=torch.bool).scatter(-1, best, True) & seen


class NsaRMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class NsaVector(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self):
        return self.weight  # accelerate loads what it has offloaded when a module is called


class NsaPhi(nn.Module):
    """Step 3, Eq. (7): a block of l rows becomes one, their mean plus a small MLP of all of them."""

    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c.cmp_block * c.head_dim, c.phi_hidden)
        self.fc2 = nn.Linear(c.phi_hidden, c.head_dim, bias=False)

    def forward(self, blocks):  # [B, G, blocks, l, D] -> [B, G, blocks, D]
        mean = blocks.mean(-2)
        rows = blocks.flatten(-2).flatten(1, 2)  # [B, G * blocks, l * D]: bitsandbytes takes no four dimensions
        return mean + self.fc2(F.silu(self.fc1(rows))).view_as(mean)


class NsaAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        c = self.config = config
        self.layer = layer
        pattern = c.attention.split(",")
        self.kind = pattern[layer % len(pattern)]  # nsa, or the window branch alone without a gate: full, window
        self.branches = ("cmp", "slc", "win") if self.kind == "nsa" else ("win",)
        self.q_proj = nn.Linear(c.dim, c.heads * c.head_dim, bias=False)
        if c.qk_norm == "on":
            for name in ("q", *("k_" + branch for branch in self.branches)):
                setattr(self, name + "_norm", NsaRMSNorm(c.head_dim, c.norm_eps))
        for branch in self.branches:
            for kind in "kv":
                setattr(self, f"{kind}_{branch}_proj", nn.Linear(c.dim, c.kv_groups * c.head_dim, bias=False))
        if self.kind == "nsa":
            self.gate_proj = nn.Linear(c.dim, 3 * c.heads, bias=False)
            self.phi_k, self.phi_v = NsaPhi(c), NsaPhi(c)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.dim, bias=False)

    def project(self, name, x):
        """Steps 1 and 2: queries, keys or values [B, G, heads of a group, N, D]. Head a of group g is head g*h + a."""
        B, N, _ = x.shape
        heads = getattr(self, name + "_proj")(x).view(B, N, self.config.kv_groups, -1, self.config.head_dim)
        norm = getattr(self, name + "_norm", None)
        return (norm(heads) if norm else heads).permute(0, 2, 3, 1, 4)

    def compress(self, name, x, phi, cache, angles):
        """All compressed keys (rotated by the angles of the new blocks) or values so far, [B, G, NC, D]."""
        c = self.config
        rows = cache.append(self.layer, name[0] + "_rows", self.project(name, x)[:, :, 0])
        new = compressed_blocks(rows.shape[2], c)
        blocks = rows.new_zeros(*rows.shape[:2], 0, rows.shape[3])
        if new > 0:
            blocks = phi(rows.unfold(2, c.cmp_block, c.cmp_stride).transpose(-1, -2))
        cache.layers[self.layer][name[0] + "_rows"] = rows[:, :, new * c.cmp_stride :]
        return cache.append(self.layer, name, rope(blocks, angles) if angles else blocks)

    def forward(self, x, cache, angles, block_angles):
        """x [B, N, C], the tokens behind those of the cache -> [B, N, C]."""
        c = self.config
        B, N, _ = x.shape
        q = rope(self.project("q", x), angles)
        keys, values = {}, {}
        for branch in ("slc", "win"):
            if branch in self.branches:
                key, value = (self.project(kind + branch, x)[:, :, 0] for kind in ("k_", "v_"))
                keys[branch] = cache.append(self.layer, "k_" + branch, rope(key, angles))
                values[branch] = cache.append(self.layer, "v_" + branch, value)
        if "cmp" in self.branches:
            keys["cmp"] = self.compress("k_cmp", x, self.phi_k, cache, block_angles)
            values["cmp"] = self.compress("v_cmp", x, self.phi_v, cache, None)
            gate = torch.sigmoid(self.gate_proj(x)).view(B, N, c.kv_groups, -1, 3).permute(0, 2, 3, 1, 4)
            gate = gate * gate.new_tensor([c.branches == "all" or name in c.branches for name in self.branches])
        outputs = []
        for begin in range(0, N, QUERIES_AT_A_TIME):
            end = min(N, begin + QUERIES_AT_A_TIME)
            t = cache.tokens + torch.arange(begin, end, device=x.device)  # positions
            args = (q[:, :, :, begin:end], keys, values, t, cache.tokens + end)
            if self.kind == "nsa":
                outputs.append(self.three_branches(*args, gate[:, :, :, begin:end]))
            else:
                outputs.append(self.dense(*args))
        out = torch.cat(outputs, dim=3).permute(0, 3, 1, 2, 4)  # [B, N, G, h, D]
        return self.o_proj(out.reshape(B, N, -1))

    def dense(self, q, keys, values, t, S):
        past = t[:, None] - torch.arange(S, device=t.device)  # [queries, S]: how far key s lies behind query t
        visible = past >= 0
        if self.kind == "window":
            visible = visible & (past < self.config.window)
        return attend(q, keys["win"][:, :, :S], values["win"][:, :, :S], visible[None, None])[0]

    def three_branches(self, q, keys, values, t, S, gate):
        """Steps 4 to 9 for the queries at positions t, the last of which is S-1. gate [B, G, h, queries, 3]."""
        c = self.config
        s, NC = torch.arange(S, device=t.device), compressed_blocks(S, c)
        past = t[:, None] - s  # [queries, S]: how far key s lies behind query t

        # 4. The compressed branch sees the blocks that end at or before the query. Eq. (8) is its softmax.
        begin = torch.arange(NC, device=t.device) * c.cmp_stride
        visible = begin + c.cmp_block - 1 <= t[:, None]
        cmp, p = attend(q, keys["cmp"][:, :, :NC], values["cmp"][:, :, :NC], visible[None, None])

        # 5, 6. Importance, Eq. (9), summed over the heads of a group, Eq. (10); the best blocks, Eq. (11). No gradient.
        with torch.no_grad():
            importance = p.sum(2) @ overlap(NC, -(-S // c.slc_block), c, t.device)
            chosen = select(importance, t, c)

        # 7. The selected branch, Eq. (12): the tokens of the chosen blocks that are not ahead of the query.
        visible = chosen[..., s // c.slc_block] & (past >= 0)
        slc, _ = attend(q, keys["slc"][:, :, :S], values["slc"][:, :, :S], visible)

        # 8. The window: the query's own key and the w - 1 before it.
        visible = (past >= 0) & (past < c.window)
        win, _ = attend(q, keys["win"][:, :, :S], values["win"][:, :, :S], visible[None, None])

        # 9. Gates, per head and branch. Eq. (5)
        return gate[..., 0:1] * cmp + gate[..., 1:2] * slc + gate[..., 2:3] * win


class NsaMLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c.dim, c.mlp_hidden, bias=False)
        self.fc2 = nn.Linear(c.mlp_hidden, c.dim, bias=False)

    def forward(self, x):
        return self.fc2(F.silu(self.fc1(x)))


class NsaLayer(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.attn_norm = NsaRMSNorm(c.dim, c.norm_eps)
        self.attn = NsaAttention(c, layer)
        self.mlp_norm = NsaRMSNorm(c.dim, c.norm_eps)
        self.mlp = NsaMLP(c)

    def forward(self, x, cache, angles, block_angles):
        x = x + self.attn(self.attn_norm(x), cache, angles, block_angles)
        return x + self.mlp(self.mlp_norm(x))


class NsaSmear(nn.Module):
    """Each input gets a part of the token before it."""

    def __init__(self, c):
        super().__init__()
        self.gate, self.scale = NsaVector(c.dim), NsaVector(c.dim)

    def forward(self, e, cache):  # [B, N, C]
        before = torch.zeros_like(e[:, :1]) if cache.last is None else cache.last
        before = torch.cat([before, e[:, :-1]], dim=1)
        cache.last = e[:, -1:]
        return e + torch.sigmoid(e @ self.gate())[..., None] * self.scale() * before


class NsaForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NsaConfig
    base_model_prefix = "model"
    _no_split_modules = ["NsaLayer"]
    _tied_weights_keys = {"head.weight": "embed_tokens.weight"}  # where config.tie_word_embeddings says so
    accepts_loss_kwargs = True  # num_items_in_batch
    supports_gradient_checkpointing = True

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        if config.smear == "on":
            self.smear = NsaSmear(config)
        self.layers = nn.ModuleList(NsaLayer(config, i) for i in range(config.layers))
        self.norm = NsaRMSNorm(config.dim, config.norm_eps)
        self.gradient_checkpointing = False
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, embeddings):
        self.embed_tokens = embeddings

    def get_output_embeddings(self):
        return self.head

    def set_output_embeddings(self, head):
        self.head = head

    @property
    def base_model(self):
        """The model without its head, which TRL computes itself."""
        return functools.partial(type(self).forward, self, states_only=True)

    def read(self, input_ids, cache):
        """The tokens [B, N] behind those of the cache -> [B, N, C]."""
        first, N, c = cache.tokens, input_ids.shape[1], self.config
        # fp64 exists on every CPU, not on every device
        angles = rope_angles(torch.arange(first, first + N), c, input_ids.device)
        blocks = torch.arange(compressed_blocks(first, c), compressed_blocks(first + N, c))
        block_angles = rope_angles(blocks * c.cmp_stride, c, input_ids.device)
        x = self.embed_tokens(input_ids)
        if c.smear == "on":
            x = self.smear(x, cache)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training and first == 0:
                # the backward pass computes the layer again, so what it keeps goes into a cache that is thrown away
                x = self._gradient_checkpointing_func(
                    lambda x, layer=layer: layer(x, NsaCache(c.layers), angles, block_angles), x)
            else:
                x = layer(x, cache, angles, block_angles)
        cache.tokens += N
        return x.to(input_ids.device)  # with device_map the last layer may be elsewhere

    def read_rows(self, input_ids, seen, caches):
        """Blocks are counted from a sequence's first token, so each row is read alone, without what the mask seen
        [B, N] hides. There the result has what the last token before it has, or zeros: whoever takes the last column
        continues the text, whichever side is padded."""
        rows = []
        for ids, shown, cache in zip(input_ids, seen, caches.rows, strict=True):
            x = torch.zeros(1, self.config.dim, dtype=self.dtype, device=ids.device)
            if shown.any():
                x = torch.cat([x, self.read(ids[None, shown], cache)[0]])
            rows.append(x[shown.cumsum(0)])
        caches.columns += input_ids.shape[1]
        return torch.stack(rows)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,   # [B, tokens so far]: 0 hides padding, wherever it stands
        cache=None,            # what an earlier call returned
        labels=None,           # [B, N] as input_ids; -100 is left out of the loss
        use_cache=None,        # None: yes, as other models do, but not for a loss
        logits_to_keep=0,      # logits of the last so many tokens; 0: all
        return_dict=None,
        output_attentions=False,
        output_hidden_states=False,
        inputs_embeds=None,
        position_ids=None,
        past_key_values=None,  # the same, as transformers called it before 5.24
        num_items_in_batch=None,  # Trainer: the loss is a sum over this batch, divided by so many tokens of several
        states_only=False,     # stops before the head
    ):
        if output_attentions or output_hidden_states or return_dict is False:
            raise ValueError("this model returns loss, logits and cache as a dict: no attentions, no hidden states")
        if inputs_embeds is not None or input_ids is None:
            raise ValueError("this model takes input_ids and no inputs_embeds")
        if position_ids is not None:
            raise ValueError("positions are counted from each row's first token: leave position_ids out, and hide"
                             " padding by attention_mask")
        if input_ids.shape[1] == 0:
            raise ValueError("an empty prompt has nothing to continue: begin with tokenizer.bos_token, which stands"
                             " before every document")
        if use_cache is None:
            use_cache = labels is None and not self.training
        use_cache = use_cache and not (self.gradient_checkpointing and self.training)
        N, cache = input_ids.shape[1], past_key_values if cache is None else cache
        if cache is None:
            cache = NsaCache(len(self.layers))
        elif not isinstance(cache, (NsaCache, NsaRowCaches)):
            raise ValueError(f"the cache is a {type(cache).__name__}, expected an NsaCache")
        seen = self.new_columns(attention_mask, input_ids, cache)
        # Behind a row's tokens padding does no harm, since no token looks ahead, unless decoding goes on behind it.
        if isinstance(cache, NsaCache) and not seen.all() and (use_cache or bool((seen[:, 1:] > seen[:, :-1]).any())):
            rows = torch.arange(len(input_ids)).split(1)
            cache = NsaRowCaches([cache.chosen(row) if cache.tokens else NsaCache(len(self.layers)) for row in rows],
                                 cache.tokens)
        by_rows = isinstance(cache, NsaRowCaches)
        x = self.read_rows(input_ids, seen, cache) if by_rows else self.read(input_ids, cache)
        if not by_rows and not seen.all():  # padding has what the last token before it has, as in read_rows
            x = x.gather(1, (seen.cumsum(1) - 1).clamp(min=0)[..., None].expand_as(x))
        x = self.norm(x[:, -logits_to_keep:])
        if states_only:
            return BaseModelOutputWithPast(last_hidden_state=x, **{CACHE: cache if use_cache else None})
        logits = self.head(x)

        loss = None
        if labels is not None:
            if logits_to_keep:
                raise ValueError("labels need the logits of all tokens: leave logits_to_keep out")
            if by_rows:  # nothing stands before a row's first token
                labels = labels.masked_fill(seen.cumsum(1) == seen, -100)
            labels = labels[:, 1:].flatten().to(logits.device)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels,
                                   reduction="mean" if num_items_in_batch is None else "sum")
            if num_items_in_batch is not None:
                loss = loss / torch.as_tensor(num_items_in_batch, device=loss.device)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache if use_cache else None})

    @staticmethod
    def new_columns(mask, input_ids, cache):
        """Of attention_mask those of input_ids, [B, N]; True: a token."""
        B, N = input_ids.shape
        if mask is None:
            return torch.ones(B, N, dtype=torch.bool, device=input_ids.device)
        whole = (B, cache.get_seq_length() + N)
        if mask.shape not in (whole, (B, N)):
            raise ValueError(f"attention_mask has the shape {tuple(mask.shape)}, expected {whole}: 1 for a token, 0 for"
                             " padding")
        return mask[:, -N:].bool()

    # generate()

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # forward() makes its own

    def _prepare_attention_mask_for_generation(self, inputs, generation_config, *others, **more):
        """Where no mask is given and padding is end-of-text, which begins documents, nothing is padding."""
        if generation_config.pad_token_id == self.config.bos_token_id:
            return torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        return super()._prepare_attention_mask_for_generation(inputs, generation_config, *others, **more)

    def prepare_inputs_for_generation(
        self, input_ids, attention_mask=None, use_cache=True, logits_to_keep=1, inputs_embeds=None, cache=None,
        past_key_values=None, **others
    ):
        cache = past_key_values if cache is None else cache
        # input_ids: all so far, or those behind what a cache of the caller's has; then attention_mask is longer
        N, first = input_ids.shape[1], 0
        if cache is not None and "next_sequence_length" in others:  # since transformers 5; None: all are new
            first = N - (N if others["next_sequence_length"] is None else others["next_sequence_length"])
        elif cache is not None:
            first = cache.get_seq_length() - (N if attention_mask is None else attention_mask.shape[1]) + N
        return {
            "input_ids": input_ids[:, first:],
            "inputs_embeds": inputs_embeds,
            CACHE: cache,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep or 1,
        }
