"""The settings of the core and their defaults, which flags replace. Edit them here, or give flags.

The docstring under each field is its documentation: `--help` and docs/settings.md are generated from it.
Names are fms-fsdp's where it has one, otherwise Hugging Face's or Megatron's. What a configuration answers beyond its
fields is config/training.py; extensions have settings of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pretraining.config.declaration import (
    COMMON,
    PER_HOST,
    STORABLE,
    Above,
    AtLeast,
    Grammar,
    KeyOf,
    Needs,
    OneOf,
    Resume,
)
from pretraining.config.grammar import (
    RECOMPUTABLE,
    parse_modules,
    parse_name,
    parse_selective,
    parse_split,
    parse_steps,
    parse_weights,
)
from pretraining.config.variants import CUSTOM, VARIANTS

Activation = Literal["swiglu", "geglu", "geglu_tanh", "reglu", "gelu", "gelu_tanh", "relu", "silu", "squared_relu"]
ShardingStrategy = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"]
InitMethod = Literal["normal", "scaled_normal", "small_init", "wang_init", "xavier_normal", "xavier_uniform"]

LLAMA3 = Needs("rope_scaling_type", "llama3")
BLOCKS = Grammar(parse_selective, "k for every k-th block (1, 2, 3, ...), or a share of the blocks (1/3, 0.5)")
MODULES = Grammar(parse_modules, f"some of {', '.join(RECOMPUTABLE)}, comma-separated")
NAME = Grammar(parse_name, "a name without a slash, of at most 255 bytes; --log_dir may be any folder")
WEIGHTS = Grammar(parse_weights, "a number above 0 for each dataset, comma-separated, such as 2,1,0.5")
SPLIT = Grammar(parse_split, "up to three numbers, for train, valid and test, such as 949,50,1")
STEPS = Grammar(parse_steps, "step numbers from 0, comma-separated, such as 0,100,1000")
TOKENS = Grammar(parse_steps, "token ids, comma-separated, such as 0,1")


@dataclass(frozen=True)
class Settings:
    """Every setting of the core. Strings that list several values are comma-separated."""

    # ---- Model
    model_variant: Annotated[str, OneOf((*VARIANTS, CUSTOM)), Resume.FREE, COMMON] = "llama2_7b"
    """Row of the variant table that gives the dimensions below. The 7b, 13b, 34b and 70b are short names of llama2_*;
    tiny and mini are for CPUs; "custom": every dimension is set by its own flag. Elsewhere: model, model_name."""
    num_layers: Annotated[int | None, AtLeast(1, below=10_000), Resume.SHAPE] = None
    """Transformer blocks. None: the variant's. Upper bounds here and below are far above any model: they end what would
    exhaust memory before it is reported. Elsewhere: num_hidden_layers, n_layers, n_layer, base_num_decoder_layers."""
    hidden_size: Annotated[int | None, AtLeast(1, below=2**20), Resume.SHAPE] = None
    """Width of the residual stream, a multiple of num_attention_heads unless head_dim is set. None: the variant's.
    Elsewhere: dim, d_model, n_embd, base_emb_dim."""
    intermediate_size: Annotated[int | None, AtLeast(1, below=2**22), Resume.SHAPE] = None
    """Width of the feed-forward layer; with a gated activation, gate and up projection each have this width. None: the
    variant's. Elsewhere: ffn_hidden_size, hidden_dim, ffn_dim, base_mlp_dim."""
    num_attention_heads: Annotated[int | None, AtLeast(1, below=2**16), Resume.SHAPE] = None
    """Query heads. None: the variant's. Elsewhere: n_heads, n_head, base_num_query_heads."""
    num_kv_heads: Annotated[int | None, AtLeast(1, below=2**16), Resume.SHAPE] = None
    """Key/value heads (grouped-query attention), a divisor of num_attention_heads. None: the variant's; for "custom",
    num_attention_heads. Elsewhere: num_key_value_heads, num_query_groups, n_kv_heads, base_num_kv_heads."""
    head_dim: Annotated[int | None, AtLeast(2, below=2**16), Resume.SHAPE] = None
    """Width of one head, an even number. None: hidden_size / num_attention_heads."""
    vocab_size: Annotated[int | None, AtLeast(1, below=2**24), Resume.SHAPE] = None
    """Rows of the embedding and of the output head; every token id must be below it. None: the variant's (no default
    for "custom")."""
    make_vocab_size_divisible_by: Annotated[int, AtLeast(1, below=2**20)] = 1
    """The embedding and the output head are padded to a multiple of this x tensor_parallel_size rows. Padding rows are
    zero, do not take part in the loss and are not saved in checkpoints."""
    max_position_embeddings: Annotated[int | None, AtLeast(1, below=2**28), Resume.FREE] = None
    """Longest sequence of the model in tokens, at least seq_length. None: the variant's, or seq_length for "custom". A
    checkpoint of a model with position_embedding_type=learned_absolute must have the same. Elsewhere: max_seq_len."""
    norm_type: Annotated[Literal["rmsnorm", "layernorm"], Resume.FUNCTION] = "rmsnorm"
    """Normalization: "rmsnorm", or "layernorm" (subtracts the mean; with norm_bias, adds a bias)."""
    norm_eps: Annotated[float, Above(0), Resume.FUNCTION] = 1e-5
    """Constant that a norm adds to the mean square or to the variance. Elsewhere: rms_norm_eps, layernorm_epsilon,
    normalization_layer_epsilon."""
    norm_bias: Annotated[bool, Needs("norm_type", "layernorm"), Resume.FUNCTION] = False
    """Add a bias in every norm."""
    qk_norm: Annotated[bool, Resume.FUNCTION] = False
    """Normalize the queries and keys of each head before their rotation (q_norm and k_norm of Qwen 3). Elsewhere:
    qk_layernorm."""
    activation: Annotated[Activation, Resume.FUNCTION] = "swiglu"
    """Activation of the feed-forward layer. "swiglu", "geglu", "geglu_tanh" and "reglu" are gated: a second matrix
    multiplies the activation. "gelu", "gelu_tanh" (its approximation), "relu", "silu" and "squared_relu" (Nemotron's)
    are plain."""
    attn_bias: Annotated[bool, Resume.FUNCTION] = False
    """Add biases in the four projections of attention."""
    qkv_bias: Annotated[bool, Resume.FUNCTION] = False
    """Add biases in the projections of queries, keys and values alone (Qwen 2)."""
    mlp_bias: Annotated[bool, Resume.FUNCTION] = False
    """Add biases in the projections of the feed-forward layer."""
    parallel_residual: Annotated[bool, Resume.FUNCTION] = False
    """Compute x + attention(norm(x)) + feed-forward(norm(x)), each with its own norm, instead of one after the other
    (GPT-J, GPT-NeoX)."""
    shared_norm: Annotated[bool, Needs("parallel_residual", True), Resume.FUNCTION] = False
    """Attention and feed-forward layer read one norm (GPT-J, Falcon)."""
    scale_embeddings: Annotated[bool, Resume.FUNCTION] = False
    """Multiply what enters the first block by the root of hidden_size (Gemma)."""
    logit_softcap: Annotated[float, AtLeast(0), Resume.FUNCTION] = 0.0
    """Keep the logits below this in magnitude: logit_softcap x tanh(logit / logit_softcap) (Gemma 2: 30). 0: no cap."""
    tie_word_embeddings: Annotated[bool, Resume.STATE] = False
    """Use the embedding as output head: one matrix, whose gradient is the sum of both uses. Elsewhere: tie_weights,
    logits_via_embedding."""
    position_embedding_type: Annotated[Literal["rope", "learned_absolute", "none"], Resume.FUNCTION] = "rope"
    """"rope", "learned_absolute" (a vector for each of max_position_embeddings positions, added to the embedding of the
    token) or "none" (only the causal mask depends on positions)."""
    rotary_percentage: Annotated[float, Above(0, at_most=1), Resume.FUNCTION] = 1.0
    """Fraction of the channels of a head that is rotated, counted from the first channel; the others carry no position.
    Elsewhere: rotary_pct, rotary_percent."""
    rope_theta: Annotated[float | None, Above(0), Resume.FUNCTION] = None
    """Base of the rotary frequencies. None: the variant's (10000 for "custom"). Elsewhere: rotary_base, rope_base."""
    rope_scaling_type: Annotated[Literal["none", "linear", "llama3"], Resume.FUNCTION] = "none"
    """"none", "linear" (positions are divided by rope_scaling_factor) or "llama3" (Llama 3.1's scaling per
    frequency)."""
    rope_scaling_factor: Annotated[float, AtLeast(1), Needs("rope_scaling_type"), Resume.FUNCTION] = 8.0
    """Factor of the rope scaling."""
    rope_low_freq_factor: Annotated[float, Above(0), LLAMA3, Resume.FUNCTION] = 1.0
    """llama3 scaling: frequencies of wavelengths above rope_original_max_position / this are divided by the factor."""
    rope_high_freq_factor: Annotated[float, Above(0), LLAMA3, Resume.FUNCTION] = 4.0
    """llama3 scaling: frequencies of wavelengths below rope_original_max_position / this are not scaled."""
    rope_original_max_position: Annotated[int, AtLeast(1, below=2**28), LLAMA3, Resume.FUNCTION] = 8192
    """llama3 scaling: context length of the original model in tokens."""
    sliding_window: Annotated[int | None, AtLeast(1, below=2**28), Resume.FUNCTION] = None
    """Tokens that a token attends to, itself included. None: all previous tokens."""
    hidden_dropout: Annotated[float, AtLeast(0, below=1)] = 0.0
    """Dropout probability of the embedding and of what attention and feed-forward layer add to the residual stream. The
    dropped values of all three dropouts are a function of (seed, step, row, token, channel): the same on every mesh and
    after a resume. Validation and test have no dropout. Elsewhere: dropout, dropout_rate."""
    attention_dropout: Annotated[float, AtLeast(0, below=1)] = 0.0
    """Dropout probability of the attention weights. Elsewhere: attn_dropout, dropout."""
    ffn_dropout: Annotated[float, AtLeast(0, below=1)] = 0.0
    """Dropout probability of the activation of the feed-forward layer."""
    init_std: Annotated[float, AtLeast(0)] = 0.02
    """Standard deviation s of the initial weights, which init_method refers to. Biases start at 0."""
    init_method: InitMethod = "normal"
    """Standard deviation of the initial weights: "normal" s, "scaled_normal" s / sqrt(2 num_layers), "small_init"
    sqrt(2 / (5 hidden_size)) (Nguyen and Salazar 2019), "wang_init" 2 / (num_layers sqrt(hidden_size)) (Wang and
    Komatsuzaki 2021), "xavier_normal" sqrt(2 / (inputs + outputs)) (Glorot and Bengio 2010), or "xavier_uniform", a
    uniform distribution with the same standard deviation."""
    output_init_method: InitMethod = "scaled_normal"
    """init_method of the output projections of attention and feed-forward layer, whose results are summed over all
    blocks."""

    # ---- Engine and sharding
    engine: Annotated[Literal["auto", "xla", "torch"], COMMON] = "auto"
    """"xla" (torch-xla, GSPMD), "torch" (FSDP2) or "auto": torch if there is a CUDA GPU, if device is set or if
    there are several processes; otherwise xla if torch-xla is installed, otherwise torch on the CPU. The choice and its
    reason are printed."""
    device: Literal["auto", "cuda", "cpu", "tpu", "neuron"] = "auto"
    """Device of the torch engine: "cuda", "cpu", "tpu" (TorchTPU, requirements/torchtpu.txt; not run on TPU hardware
    yet), "neuron" (TorchNeuron; untested on hardware) or "auto". PJRT_DEVICE names the device of the xla engine."""
    sharding_strategy: Annotated[ShardingStrategy, COMMON] = "hsdp"
    """How parameters, gradients and optimizer state are sharded: "ddp" (all replicated), "zero1" (optimizer state
    sharded), "zero2" (gradients too), "fsdp" (all sharded over all devices), "hsdp" (all sharded within groups of
    sharding_group_size devices, replicated across groups). fsdp needs the least memory; hsdp keeps its all-gathers
    within a host or TPU slice; zero1 all-gathers parameters once per step instead of twice per micro-batch, if
    unsharded parameters fit; ddp is for models that are small compared with the memory of a device. Between steps, the
    torch engine shards parameters with every strategy but ddp. Case is ignored. Elsewhere: zero_stage."""
    sharding_group_size: Annotated[int, AtLeast(0), Needs("sharding_strategy", "hsdp")] = 0
    """Data-parallel ranks per sharding group of hsdp, a divisor of devices / (tensor_parallel_size x
    context_parallel_size). 0: those of one host, or of one TPU slice, whose chips have fast links across its hosts.
    Elsewhere: data_parallel_shard_degree, ici_fsdp_parallelism."""
    tensor_parallel_size: Annotated[int, AtLeast(1), COMMON] = 1
    """Devices that share every matrix product: heads, feed-forward channels and vocabulary are sharded over them, and
    activations are all-reduced twice per block. They are adjacent devices, best of one host. For models whose layers,
    or whose smallest batch, are too large for one device. A divisor of num_attention_heads and intermediate_size. 1:
    none. Elsewhere: tensor_model_parallel_size, tensor_parallel_degree, tp, tp_size, ici_tensor_parallelism."""
    sequence_parallel: bool = False
    """With tensor_parallel_size above 1: between matrix products, the tokens of a row are sharded over the tensor ranks
    too, so that norms and residuals are neither stored nor computed more than once."""
    context_parallel_size: Annotated[int, AtLeast(1)] = 1
    """Devices that share the tokens of a row, for sequences whose activations are too large for one device; keys and
    values are all-gathered for attention. Parameters are sharded over them as over data-parallel ranks. 1: none.
    Elsewhere: context_parallel_degree, cp, cp_size, ici_context_parallelism."""
    low_cpu_fsdp: Annotated[bool, Resume.FREE] = False
    """True: build the model on the meta device and create each shard in place, so that host memory grows by one
    parameter at a time. False: build the whole model in host memory first. The initial weights are the same. With every
    sharding_strategy. Elsewhere: low_cpu_mem_usage."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (FSDP2's offload policy). CUDA only. Elsewhere:
    offload."""
    collective_timeout: Annotated[int, AtLeast(1, below=10**9), Resume.FREE] = 600
    """Seconds that a collective of the torch engine may wait for a peer before the run ends with an error. Elsewhere:
    ddp_timeout, timeout."""

    # ---- Precision
    mixed_precision: Annotated[bool, COMMON] = True
    """True: parameters and optimizer state in fp32, matrix products and activations in bf16, gradients reduced in fp32.
    False: everything in fp32. Elsewhere: bf16."""
    precision: Literal[
        "auto", "fp32", "mixed_bf16", "mixed_bf16_sr", "bf16_sr", "autocast", "fp16", "fp8", "manual"
    ] = "auto"
    """Refines mixed_precision. "auto": mixed_bf16 if mixed_precision, else fp32. "mixed_bf16_sr": mixed_bf16, and the
    bf16 copy of the parameters that matrix products read is rounded stochastically. "bf16_sr": parameters, gradients
    and optimizer state in bf16 without an fp32 copy; the optimizer rounds what it writes stochastically. "autocast":
    matrix products in bf16, everything between them in fp32, like torch.autocast. "fp16": mixed_bf16 with fp16 instead
    of bf16, and a loss scale. "fp8": mixed_bf16, and the linear layers of the blocks multiply float8 matrices (inputs
    and weights e4m3, gradients e5m2), each scaled by its largest element; FSDP gathers weights in bf16. GPUs of compute
    capability 8.9 or newer, or the CPU. MFU remains a share of the bf16 peak. "manual": mixed_bf16 with master_weights,
    fp32_grad_acc and stochastic_rounding. Elsewhere: dtype, fp16."""
    attention_impl: Literal["auto", "splash", "chunked"] = "auto"
    """How attention is computed: "chunked" (plain operations on chunks of the queries), "splash" (by the xla engine
    with JAX's fused kernel for TPUs, which needs the packages of requirements/tpu-aot.txt), or "auto": with the
    device's fused kernel where there is one. The xla engine prints which one runs, and why. Elsewhere:
    attn_implementation, flash_attention, use_flash_attn."""
    reduce_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype in which gradients are summed over devices: "fp32", "bf16" or "auto": fp32 on the torch engine, the dtype
    of the parameters on the xla engine. bf16 sends half the bytes, and the sums have a relative error of about 0.5 %
    over 16 devices and 1 % over 64 (it grows with the square root). On the torch engine, ddp, zero1 and the replicas of
    hsdp sum the micro-batches of a step in it, too. Elsewhere: mixed_precision_reduce."""

    # ---- Activation checkpointing
    fsdp_activation_checkpointing: Annotated[bool, COMMON] = False
    """Recompute the activations of the blocks that selective_checkpointing chooses in the backward pass instead of
    storing them, with every sharding_strategy. Elsewhere: gradient_checkpointing, activation_checkpoint,
    recompute_activations, remat_policy."""
    selective_checkpointing: Annotated[str, BLOCKS, COMMON] = "1"
    """Blocks that are recomputed: an integer k (every k-th block; 1 is all) or a fraction between 0 and 1, such as
    "1/3" or "0.5" (that fraction of the blocks, evenly spaced and centred)."""
    checkpoint_granularity: Annotated[Literal["full", "selective"], Needs("fsdp_activation_checkpointing")] = "full"
    """What is recomputed of a chosen block: "full" (all of it), or "selective" (the modules that checkpoint_modules
    names, and operations that are cheap compared with the memory of their results). Also: recompute_granularity."""
    checkpoint_modules: Annotated[str, MODULES, Needs("checkpoint_granularity", "selective")] = ""
    """"attention" (with its projections), "mlp", "norm", "mlp_activation" (the activation and its product with the
    gate) and "core_attention", comma-separated. Attention scores are always recomputed, as they are never stored.
    Also: recompute_modules."""
    checkpoint_num_layers: Annotated[int, AtLeast(1), Needs("fsdp_activation_checkpointing")] = 1
    """Blocks that are recomputed together from the input of the first, which alone is stored; for
    checkpoint_granularity=full with every block chosen. Also: recompute_num_layers."""
    save_attention: Annotated[bool, Needs("fsdp_activation_checkpointing")] = False
    """Store the results of attention's kernel in recomputed blocks (the output, and one fp32 number for each query and
    head), so that it does not run twice: faster for long sequences, with the memory of two block inputs per block."""

    # ---- Optimizer and schedule
    optimizer: Annotated[str, KeyOf("optimizers"), Resume.STATE, COMMON] = "adamw"
    """"adamw", "adam" (adds the decay to the gradient), or one that extensions/optimizers adds; the table of optimizers
    in docs/settings.md has the sources and defaults of all. Elsewhere: optim."""
    learning_rate: Annotated[float | None, Above(0), Resume.RATE, COMMON] = None
    """Peak learning rate. None: the optimizer's default, 3e-4 for adamw. Elsewhere: lr, max_lr."""
    adam_beta1: Annotated[float | None, AtLeast(0, below=1)] = None
    """Decay of the first moment, of optimizers that have one. None: the optimizer's default, 0.9 for adamw. Elsewhere:
    beta1, betas, adam_b1."""
    adam_beta2: Annotated[float | None, AtLeast(0, below=1)] = None
    """Decay of the second moment. None: the optimizer's default, 0.95 for adamw. Elsewhere: beta2, betas, adam_b2."""
    optimizer_eps: Annotated[float | None, Above(0)] = None
    """Constant that is added to a denominator. None: the optimizer's default, 1e-8 for adamw. Elsewhere: adam_epsilon,
    adam_eps, eps."""
    weight_decay: Annotated[float | None, AtLeast(0), COMMON] = None
    """Weight decay: per unit of learning rate, or added to the gradient by optimizers whose source does so. None: the
    optimizer's default, 0.1 for adamw. Elsewhere: adam_weight_decay."""
    norm_weight_decay: bool = False
    """Decay norm weights and biases too."""
    grad_clip_thresh: Annotated[float, AtLeast(0)] = 1.0
    """Norm above which gradients are scaled down. 0: never. Elsewhere: max_grad_norm, gradient_clipping, clip_grad,
    max_norm, gradient_clip_val, grad_clip, gradient_clipping_threshold."""
    grad_clip_norm_type: Annotated[float, AtLeast(1, special=0, below=5)] = 2.0
    """p of the p-norm over all gradients that is reported and clipped by. 0: the largest absolute value. The sum of
    higher powers than 4 leaves the range of fp32."""
    z_loss: Annotated[float, AtLeast(0)] = 0.0
    """Factor of the squared logarithm of the softmax's denominator, which is added to the training loss of every token
    and keeps logits from drifting (Chowdhery et al. 2022: 1e-4). Validation and test losses do not have it. 0: none."""
    lr_schedule: Annotated[str, KeyOf("schedules"), Resume.RATE, COMMON] = "fms_cosine"
    """Learning rate by step. fms-fsdp's: "fms_cosine" (quadratic warm-up over min(2000, num_steps // 20) steps, then a
    cosine to 10 % of the peak), "fms_annealing" (linear from the peak to 0). "wsd": warm-up, lr_hold_steps at the peak,
    then linear to min_lr. NeMo's: those without a prefix. The table of schedules in docs/settings.md describes all.
    Elsewhere: lr_scheduler_type, lr_decay_style."""
    lr_warmup_steps: Annotated[int | None, AtLeast(0), Resume.RATE, COMMON] = None
    """Optimizer steps of the warm-up, fewer than the schedule has. None: lr_warmup_ratio, or no warm-up. fms_cosine has
    its own rule. Elsewhere: warmup_steps, warmup_iters, lr_warmup_iters, warmup."""
    lr_warmup_ratio: Annotated[float | None, AtLeast(0, below=1), Resume.RATE] = None
    """Warm-up as a fraction of the steps of the schedule; instead of lr_warmup_steps. Elsewhere: warmup_ratio,
    lr_warmup_fraction, warmup_steps_fraction."""
    lr_decay_steps: Annotated[int | None, AtLeast(1), Resume.RATE] = None
    """Optimizer steps of the schedule; later steps keep its last rate, unless the table of schedules says otherwise (of
    constant: min_lr). None: num_steps. Elsewhere: lr_decay_iters, learning_rate_schedule_steps."""
    lr_hold_steps: Annotated[int, AtLeast(0), Resume.RATE] = 0
    """Optimizer steps at the peak after the warm-up: wsd, and schedules whose names end in _hold. Elsewhere:
    decay_ratio."""
    lr_constant_steps: Annotated[int, AtLeast(0), Resume.RATE] = 0
    """cosine: optimizer steps at min_lr at the end of the schedule; the cosine ends before them."""
    min_lr: Annotated[float, AtLeast(0), Resume.RATE] = 0.0
    """Lowest learning rate of the schedule, at most learning_rate. fms_cosine ends at a tenth of the peak instead."""
    max_skipped_steps: Annotated[int, AtLeast(0)] = 0
    """Optimizer steps with a loss or gradient that is not finite that may be skipped before training stops with exit
    code 3, counted anew at every start. A skipped step does not change parameters or optimizer state."""

    # ---- Batch and length
    batch_size: Annotated[int, AtLeast(1, below=2**20), COMMON] = 2
    """Sequences per data-parallel rank in one forward and backward pass (the micro-batch). A rank is
    tensor_parallel_size x context_parallel_size devices. Elsewhere: micro_batch_size, local_batch_size,
    per_device_train_batch_size, per_device_batch_size."""
    global_batch_size: Annotated[int | None, AtLeast(1, below=2**24), COMMON] = None
    """Sequences per optimizer step over all devices, a multiple of batch_size x ranks; the quotient is the number of
    micro-batches. None: batch_size x ranks x gradient_accumulation_steps. Elsewhere: train_batch_size."""
    gradient_accumulation_steps: Annotated[int | None, AtLeast(1, below=2**20)] = None
    """Micro-batches per optimizer step. None: derived from global_batch_size, or 1. Elsewhere: accumulate_grad_batches,
    grad_accum."""
    seq_length: Annotated[int, AtLeast(1, below=2**28, special=0), COMMON] = 0
    """Length of a sequence in tokens. 0: the longest of the model, at most 4096. Elsewhere: seq_len, max_length,
    max_seq_length, block_size, context_length, max_target_length."""
    num_steps: Annotated[int, AtLeast(1), COMMON] = 1_000_000
    """Optimizer steps of the whole run; the learning rate schedule spans them. Elsewhere: max_steps, train_iters,
    steps."""
    seed: Annotated[int, AtLeast(0, below=2**63), COMMON] = 2023
    """Seed of the initial weights, of dropout and of the order of the data. Elsewhere: random_seed."""

    # ---- Data
    use_dummy_dataset: Annotated[bool, COMMON] = False
    """Train on a deterministic stream of counters, for performance runs. Neither saves nor resumes unless
    checkpoint_interval is given."""
    data_path: Annotated[str, Resume.FREE, COMMON, STORABLE, PER_HOST] = ""
    """Folder of token shards, local or s3://BUCKET/NAME or gs://BUCKET/NAME (credentials as the clouds' own tools find
    them): one sub-folder per dataset, or the shards themselves. Of a folder that prepare.py wrote, or a DatasetDict
    that Hugging Face's datasets saved, training, validation and test take their own splits. Elsewhere: train_data_path,
    dataset_path, train_data."""
    datasets: Annotated[str, COMMON] = ""
    """Sub-folders of data_path to mix. Empty: all of them, or data_path itself where it holds shards."""
    weights: Annotated[str, WEIGHTS, COMMON] = ""
    """Fraction of each dataset in the mixture, by tokens, in the order of datasets; normalized, and rounded to
    65,536ths, of which each dataset has at least one. Empty: by size."""
    logical_shards: Annotated[int, AtLeast(1, below=2**24)] = 1024
    """Lanes of neighbouring sequences that an epoch of a dataset is divided into; one sequence is taken from each lane
    in turn, so consecutive sequences come from different places of the data. It need not divide anything."""
    tokenizer_path: Annotated[str, STORABLE] = ""
    """The tokenizer that made the tokens: a sentencepiece model or a tokenizer.json. Validation and test read it to
    report bits per byte (special tokens count 0 bytes); pretraining.tools.generate turns a prompt into tokens and back
    with it. Another one than prepare recorded in meta.json is refused, there and here. Empty: none."""
    sep_token: Annotated[int | None, AtLeast(-1, below=2**24)] = None
    """Token id put after every document; -1: none, for rows that are packed already. None: the one that preparation
    recorded in meta.json next to the shards, otherwise 1, as in fms-fsdp; an error where the documents end with
    another id. Documents that end with the separator already need strip_tokens, which is an error otherwise, except in
    object storage with sep_token set."""
    eos_token: Annotated[int | None, AtLeast(0, below=2**24)] = None
    """fms-fsdp's newer name of sep_token; set only one of the two."""
    bos_token: Annotated[int | None, AtLeast(0, below=2**24)] = None
    """Token id put before every document, and before the texts of evaluation and of the export. None: none."""
    bol_token: Annotated[int | None, AtLeast(0, below=2**24)] = None
    """Token id at the first position of every sequence. None: none."""
    eol_token: Annotated[int | None, AtLeast(0, below=2**24)] = None
    """Token id that is the last label of every sequence, instead of the next token of the stream. None: none."""
    strip_tokens: Annotated[str, TOKENS] = ""
    """Token ids, comma-separated: one of them at the beginning of a document and one at its end are removed, so that
    separators that are already in the data are not repeated."""
    file_type: Literal["auto", "arrow", "parquet", "megatron"] = "auto"
    """Shards to read: "arrow" (IPC files and streams), "parquet", "megatron" (.idx next to .bin) or "auto": all of
    them, recognised by their content."""
    col_name: str = "tokens"
    """Column of Arrow and Parquet shards that holds the token ids. A list column `labels` (-100: not trained) or
    `loss_mask` (0: not trained) next to it excludes tokens from the loss."""
    split: Annotated[str, SPLIT, COMMON] = ""
    """Fractions of every dataset's documents for training, validation and test, on any scale, such as "949,50,1".
    Empty: all for training."""
    max_samples: Annotated[int | None, AtLeast(1)] = None
    """Documents of every dataset that are used for training, counted from its beginning. None: all."""
    num_epochs: Annotated[int | None, AtLeast(1), COMMON] = None
    """Passes over the data; training ends there if num_steps is not reached before. None: as many as num_steps
    needs."""
    shuffle: Literal["shards", "none"] = "shards"
    """"shards": another order of all documents in each epoch. "none": the order in which they are stored."""
    eod_mask_loss: bool = False
    """Exclude from the loss the prediction of the token after a separator."""
    reset_position_ids: bool = False
    """Count positions from 0 in every document of a sequence."""
    reset_attention_mask: bool = False
    """Attend only within a document."""
    index_dir: Annotated[str, PER_HOST] = ""
    """Folder of the shards' indexes (12 bytes a document; of Parquet shards the decoded tokens too), which are built
    once. Empty: pretraining/token_index in $XDG_CACHE_HOME, otherwise in ~/.cache."""
    num_workers: Annotated[int, AtLeast(1, below=4096), Resume.FREE, PER_HOST] = 1
    """Threads that read batches ahead. The order of the data does not depend on it. Elsewhere:
    dataloader_num_workers."""

    # ---- Validation
    valid_data_path: Annotated[str, COMMON, STORABLE, PER_HOST] = ""
    """Folder of held-out token shards, laid out like data_path. val_interval needs this, split or a data_path that has
    a validation split, except with use_dummy_dataset."""
    valid_datasets: str = ""
    """Sub-folders of valid_data_path. Empty: all of them, or valid_data_path itself where it holds shards."""
    valid_weights: Annotated[str, WEIGHTS] = ""
    """Fraction of each of valid_datasets, like weights. Empty: by size."""
    val_interval: Annotated[int, AtLeast(0), COMMON] = 0
    """Optimizer steps between validations; another one follows the final step. val_loss is the mean over all trained
    tokens. Of several datasets, each has its val_loss/NAME and its weight in the mean, val_tokens/NAME; with
    tokenizer_path, there is val_bits_per_byte too. 0: none. Elsewhere: eval_steps, eval_interval,
    val_check_interval."""
    val_steps: Annotated[int, AtLeast(0, special=-1), COMMON] = 0
    """Global batches per validation, required by val_interval; at most one pass over the validation data. -1: all of
    them. Elsewhere: eval_iters, limit_val_batches."""
    drop_last_val: bool = True
    """True: skip what remains of the validation or test data after the last full global batch. False: read it in a
    batch whose other rows do not count. Either way, tokens of a dataset after its last full row are not read."""
    test_data_path: Annotated[str, STORABLE, PER_HOST] = ""
    """Folder of token shards for the test at the end, laid out like data_path. test_steps needs this, the third
    fraction of split or a data_path that has a test split, except with use_dummy_dataset."""
    test_steps: Annotated[int, AtLeast(0, special=-1)] = 0
    """Global batches of the test after the last step, reported as test_loss. 0: no test; -1: all of the test data."""

    # ---- Checkpoints
    ckpt_load_path: Annotated[str, Resume.FREE, COMMON, STORABLE] = ""
    """Start from this if ckpt_save_path has no checkpoint: a run folder, its checkpoints folder, one of its step_N
    folders, or a folder in Hugging Face's format (config.json and safetensors; weights only). Weights and optimizer
    state are loaded, and the step starts at 0 unless load_step is set. A path without such a checkpoint is an error,
    except ckpt_save_path itself, from which a first start has nothing to load. Elsewhere: resume_from_checkpoint,
    initial_load_path, init_from, model_name_or_path, load, load_parameters_path, load_full_state_path."""
    ckpt_save_path: Annotated[str, Resume.FREE, STORABLE] = ""
    """Folder of the checkpoints of this run, step_N each, local or s3://BUCKET/NAME or gs://BUCKET/NAME. Empty:
    <log_dir>/checkpoints. A checkpoint in it takes precedence over ckpt_load_path: the run continues. Object storage
    has no locks, so every run needs a name of its own there, and the bucket a rule that removes uploads that were never
    completed. Elsewhere: output_dir, dump_folder, out_dir, save_dir, checkpoint_dir."""
    checkpoint_interval: Annotated[int, AtLeast(0, special=-1), Resume.FREE, COMMON] = -1
    """Optimizer steps between checkpoints; the last step is always saved. 0: never save, not even on a signal. -1:
    10000, or 0 with use_dummy_dataset. Elsewhere: save_steps, save_interval, checkpoint_period."""
    keep_last_n_checkpoints: Annotated[int, AtLeast(0), Resume.FREE] = 0
    """Committed checkpoints to keep; older ones are removed after a save. 0: all. Elsewhere: save_total_limit,
    save_top_k, keep_latest_k."""
    resume: Annotated[Literal["auto", "must", "never"], Resume.FREE] = "auto"
    """"auto": continue from the newest checkpoint in ckpt_save_path if there is one, or from the previous one if the
    newest is corrupt; "must": it is an error if there is none or the newest is corrupt; "never": it is an error if
    there is one."""
    override_lr_on_resume: Annotated[bool, Resume.FREE] = False
    """Continue with another learning rate schedule than the checkpoint was trained with, which is otherwise an
    error."""
    save_optimizer: Annotated[bool, Resume.FREE] = True
    """False: save only weights. A run that continues from such a checkpoint starts with a new optimizer state."""
    checkpoint_dtype: Annotated[Literal["auto", "fp32", "bf16"], Resume.FREE] = "auto"
    """Floating-point dtype on disk: "auto" (as in memory), "fp32" or "bf16". With bf16, a resumed run is not bitwise
    identical to the uninterrupted one."""
    ckpt_io_workers: Annotated[int, AtLeast(1, below=4096), Resume.FREE, PER_HOST] = 8
    """Threads per process that hash and write, or read and verify, a checkpoint. The files do not depend on it."""
    ckpt_max_failures: Annotated[int, AtLeast(1), Resume.FREE] = 3
    """Consecutive saves to ckpt_save_path that may fail (because the disk is full, for example) before the run stops.
    The last good checkpoint is not touched."""

    # ---- Logging and profiling
    run_name: Annotated[str, NAME, Resume.FREE, COMMON] = ""
    """Name of the run, without a slash. Empty: model_variant, and a hash of the settings that a checkpoint must match
    if any of them is not its default, so that another model or optimizer gets another folder. Elsewhere:
    experiment_name, job_name."""
    log_dir: Annotated[str, Resume.FREE, COMMON, PER_HOST] = ""
    """Folder of config.json, metrics.jsonl, tensorboard/, profile/. Empty: runs/<run_name>."""
    report_interval: Annotated[int, AtLeast(1), Resume.FREE, COMMON] = 100
    """Optimizer steps between reports (a progress line and a line of metrics.jsonl). The first and the last step are
    always reported. Elsewhere: logging_steps, log_interval, log_freq, log_every_n_steps, log_period."""
    log_grad_norm: Annotated[bool, Resume.FREE] = True
    """Report the norm of the gradients before clipping. It costs nothing, because clipping needs it."""
    use_torch_compile: bool | None = None
    """Compile each block (torch engine); the xla engine always compiles. None: on accelerators. On CPUs, True needs a
    C++ compiler and takes some 20 s in the first step; the others then take 0.73 of the time. fms-fsdp's page of
    2024-02 advises against it with activation checkpointing. Here both go together (torch 2.9 and later): a block's
    checkpoint is compiled with it, which gives the same losses to the bit (test_torch_blocks.py) and recomputes only
    what gradients need: 15.4 of 265.8 TFLOP of a step of llama3_8b less than a checkpoint around the compiled block.
    Elsewhere: torch_compile, compile."""
    compile_cache_dir: Annotated[str, Resume.FREE, PER_HOST] = ""
    """Folder of the persistent compilation cache of XLA (on TPUs: the CPU backend cannot read it). Empty: off."""
