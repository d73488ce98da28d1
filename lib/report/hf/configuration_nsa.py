"""The options of a model of train_nsa, as its config.json has them. `./train_nsa export` writes this file."""

from transformers import PretrainedConfig


class NsaConfig(PretrainedConfig):
    """The letters are those of the paper, arXiv 2502.11089, and of train_nsa's dev/MODEL.md."""

    model_type = "nsa"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    attribute_map = {
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_groups",
        "intermediate_size": "mlp_hidden",
        "max_position_embeddings": "seq_len",
        "rope_theta": "rope_base",
    }

    def __init__(
        self,
        architecture="nsa",  # train_nsa reads it
        layers=2,
        dim=128,             # C, width of the residual stream
        heads=4,             # H, query heads
        kv_groups=2,         # G, groups of heads that share keys and values
        head_dim=32,         # D
        cmp_block=16,        # l, tokens of a compressed block
        cmp_stride=8,        # d, tokens between compressed blocks
        slc_block=16,        # l', tokens of a selection block
        slc_count=6,         # n, selected blocks per query and group
        window=64,           # w, keys of the sliding window
        phi_hidden=32,       # F, hidden width of the block compressor
        mlp_hidden=512,      # M
        seq_len=512,         # T, tokens of the sequences it was trained on; longer ones work
        attention="nsa",     # of each layer: "nsa", "full", "window", or a pattern that repeats: "window,nsa"
        branches="all",      # or those of "cmp,slc,win" whose gates are not 0
        smear="off",         # or "on": each input gets a gated part of the token before it
        head="tied",         # to the embedding, or "untied": a matrix of its own
        tokenizer="bytes",   # or "gpt2"
        vocab_size=256,      # V
        rope_base=10000,     # of RoPE's angles
        norm_eps=1e-6,
        qk_norm="off",       # "on": RMSNorm of every head of the queries and keys, before RoPE
        bos_token_id=None,   # stands before every document
        eos_token_id=None,   # the same
        **kwargs,
    ):
        kwargs.setdefault("tie_word_embeddings", head == "tied")
        super().__init__(**kwargs)  # first: some versions set bos_token_id and eos_token_id to None
        self.architecture = architecture
        self.layers = layers
        self.dim = dim
        self.heads = heads
        self.kv_groups = kv_groups
        self.head_dim = head_dim
        self.cmp_block = cmp_block
        self.cmp_stride = cmp_stride
        self.slc_block = slc_block
        self.slc_count = slc_count
        self.window = window
        self.phi_hidden = phi_hidden
        self.mlp_hidden = mlp_hidden
        self.seq_len = seq_len
        self.attention = attention
        self.branches = branches
        self.smear = smear
        self.head = head
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.rope_base = rope_base
        self.norm_eps = norm_eps
        self.qk_norm = qk_norm
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
