"""The whole configuration: one plain dataclass, filled in by flags.

Knows nothing of torch, devices or files, so a mistake is reported before any of them is touched.
The docstring under each field is its documentation: `--help` and configs.md are generated from it.
Names are fms-fsdp's where it has one, otherwise Hugging Face's or Megatron's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pretraining.config.declaration import Above, AtLeast, Grammar, Needs, OneOf, Resume, declared_settings
from pretraining.config.devices import PLAN_KINDS
from pretraining.config.grammar import (
    RECOMPUTABLE,
    parse_modules,
    parse_selective,
    parse_split,
    parse_steps,
    parse_weights,
)
from pretraining.config.optimizers import OPTIMIZERS, parse_arguments
from pretraining.config.schedules import SCHEDULES
from pretraining.config.variants import CUSTOM, VARIANTS

Activation = Literal["swiglu", "geglu", "reglu", "gelu", "gelu_tanh", "relu", "silu"]
ShardingStrategy = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"]
InitMethod = Literal["normal", "scaled_normal", "small_init", "wang_init", "xavier_normal", "xavier_uniform"]

BLOCKS = Grammar(parse_selective, "k for every k-th block (1, 2, 3, ...), or a share of the blocks (1/3, 0.5)")
MODULES = Grammar(parse_modules, f"some of {', '.join(RECOMPUTABLE)}, comma-separated")
ARGUMENTS = Grammar(parse_arguments, "name=value, comma-separated, such as momentum=0.9,nesterov=True")
WEIGHTS = Grammar(parse_weights, "a number above 0 for each dataset, comma-separated, such as 2,1,0.5")
SPLIT = Grammar(parse_split, "up to three numbers, for train, valid and test, such as 949,50,1")
STEPS = Grammar(parse_steps, "step numbers from 0, comma-separated, such as 0,100,1000")
TOKENS = Grammar(parse_steps, "token ids, comma-separated, such as 0,1")


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a run. Strings that list several values are comma-separated."""

    # ---- Model
    model_variant: Annotated[str, OneOf((*VARIANTS, CUSTOM)), Resume.FREE] = "llama2_7b"
    """Row of the variant table that gives the dimensions below: llama2_1.4b, llama2_7b, llama2_13b, llama2_34b,
    llama2_70b, llama3_194m_4k, llama3_1.8b, llama3_3.2b, llama3_8b, llama3_70b (and their _4k forms), 7b, 13b, 34b, 70b
    as short names of llama2_*, tiny and mini for CPUs, or "custom" (every dimension is given by its own flag)."""
    model_config_path: str = ""
    """Hugging Face's config.json of a Llama, whose dimensions, rotary settings and norm_eps are taken; flags and the
    keys of import_config win over it. Empty: none."""
    num_layers: Annotated[int | None, AtLeast(1), Resume.SHAPE] = None
    """Transformer blocks, at least 1. None: the variant's."""
    hidden_size: Annotated[int | None, AtLeast(1), Resume.SHAPE] = None
    """Width of the residual stream, a multiple of num_attention_heads unless head_dim is given. None: the variant's."""
    intermediate_size: Annotated[int | None, AtLeast(1), Resume.SHAPE] = None
    """Width of the SwiGLU feed-forward layer (gate and up each have this width). None: the variant's."""
    num_attention_heads: Annotated[int | None, AtLeast(1), Resume.SHAPE] = None
    """Query heads. None: the variant's."""
    num_kv_heads: Annotated[int | None, AtLeast(1), Resume.SHAPE] = None
    """Key and value heads (grouped-query attention), a divisor of num_attention_heads. None: the variant's; for
    "custom", num_attention_heads."""
    head_dim: Annotated[int | None, AtLeast(2), Resume.SHAPE] = None
    """Width of one head. None: hidden_size / num_attention_heads."""
    vocab_size: Annotated[int | None, AtLeast(1), Resume.SHAPE] = None
    """Rows of the embedding and of the output head; every token id must be below it. None: the variant's (no default
    for "custom")."""
    make_vocab_size_divisible_by: Annotated[int, AtLeast(1)] = 1
    """Rows of the embedding and of the output head are padded to a multiple of this x tensor_parallel_size. Rows of
    padding are zero, take no part in the loss and do not stand in checkpoints."""
    max_position_embeddings: Annotated[int | None, AtLeast(1), Resume.FREE] = None
    """Longest sequence the model is made for, in tokens, at least seq_length. None: the variant's, or seq_length
    for "custom"."""
    norm_type: Annotated[Literal["rmsnorm", "layernorm"], Resume.FUNCTION] = "rmsnorm"
    """"rmsnorm" or "layernorm" (mean and variance; with norm_bias, a bias too)."""
    norm_eps: Annotated[float, Above(0), Resume.FUNCTION] = 1e-5
    """Added to the mean square, or to the variance, in a norm; above 0."""
    norm_bias: Annotated[bool, Needs("norm_type", "layernorm"), Resume.FUNCTION] = False
    """layernorm: with a bias."""
    qk_norm: Annotated[bool, Resume.FUNCTION] = False
    """Norm each head's queries and keys before their rotation (Qwen 3's q_norm and k_norm)."""
    activation: Annotated[Activation, Resume.FUNCTION] = "swiglu"
    """Of the feed-forward layer. Gated, with a second matrix beside the first: "swiglu", "geglu", "reglu". Plain:
    "gelu", "gelu_tanh" (its approximation), "relu", "silu"."""
    attn_bias: Annotated[bool, Resume.FUNCTION] = False
    """Biases in the four projections of attention."""
    mlp_bias: Annotated[bool, Resume.FUNCTION] = False
    """Biases in the projections of the feed-forward layer."""
    parallel_residual: Annotated[bool, Resume.FUNCTION] = False
    """x + attention(norm(x)) + feed-forward(norm(x)), each with a norm of its own, in place of one after the other
    (GPT-J, GPT-NeoX)."""
    tie_word_embeddings: Annotated[bool, Resume.STATE] = False
    """The output head is the embedding: one matrix, whose gradient is the sum of both uses."""
    position_embedding_type: Annotated[Literal["rope", "learned_absolute", "none"], Resume.FUNCTION] = "rope"
    """"rope", "learned_absolute" (a vector for each of max_position_embeddings positions, added to the token's) or
    "none" (no positions at all but the causal mask)."""
    rotary_percentage: Annotated[float, Above(0, at_most=1), Resume.FUNCTION] = 1.0
    """Share of a head's channels that is rotated, the first ones, in (0, 1]; the rest carries no position."""
    rope_theta: Annotated[float | None, Above(0), Resume.FUNCTION] = None
    """Base of the rotary frequencies. None: the variant's (10000 for "custom")."""
    rope_scaling_type: Annotated[Literal["none", "linear", "llama3"], Resume.FUNCTION] = "none"
    """"none", "linear" (positions divided by rope_scaling_factor) or "llama3" (Llama 3.1's per-frequency scaling)."""
    rope_scaling_factor: Annotated[float, AtLeast(1), Resume.FUNCTION] = 8.0
    """Factor of the rope scaling, at least 1. Ignored for "none"."""
    rope_low_freq_factor: Annotated[float, Above(0), Resume.FUNCTION] = 1.0
    """llama3 scaling: wavelengths above rope_original_max_position / this are divided by the full factor."""
    rope_high_freq_factor: Annotated[float, Above(0), Resume.FUNCTION] = 4.0
    """llama3 scaling: wavelengths below rope_original_max_position / this are left alone."""
    rope_original_max_position: Annotated[int, AtLeast(1), Resume.FUNCTION] = 8192
    """llama3 scaling: context length of the original model, in tokens."""
    sliding_window: Annotated[int | None, AtLeast(1), Resume.FUNCTION] = None
    """Tokens that attention looks back on, its own included, at least 1. None: all before it."""
    hidden_dropout: Annotated[float, AtLeast(0, below=1)] = 0.0
    """Share of values that training drops, in [0, 1), of the embedding and of what attention and feed-forward add to
    the stream. Of all three: which ones is a function of (seed, step, row, token, channel), the same on every mesh and
    after a stop; validation and test drop nothing."""
    attention_dropout: Annotated[float, AtLeast(0, below=1)] = 0.0
    """The same of attention's weights."""
    ffn_dropout: Annotated[float, AtLeast(0, below=1)] = 0.0
    """The same of the feed-forward layer's activation."""
    init_std: Annotated[float, AtLeast(0)] = 0.02
    """Standard deviation s of the initial weights, as init_method uses it. Biases start at 0."""
    init_method: InitMethod = "normal"
    """Standard deviation of the initial weights: "normal" s, "scaled_normal" s / sqrt(2 num_layers), "small_init"
    sqrt(2 / (5 hidden_size)) (Nguyen and Salazar 2019), "wang_init" 2 / (num_layers sqrt(hidden_size)) (Wang and
    Komatsuzaki 2021), "xavier_normal" sqrt(2 / (inputs + outputs)) (Glorot and Bengio 2010), or "xavier_uniform", as
    wide but without tails."""
    output_init_method: InitMethod = "scaled_normal"
    """The same for the output projections of attention and feed-forward, which the residual stream sums over depth."""

    # ---- Engine and sharding
    engine: Literal["auto", "xla", "torch"] = "auto"
    """"xla" (torch-xla, GSPMD), "torch" (FSDP2) or "auto": torch where a CUDA GPU is at hand, otherwise xla where
    torch-xla is installed, otherwise torch on the CPU. The choice and its reason are printed."""
    device: Literal["auto", "cuda", "cpu", "tpu"] = "auto"
    """Device of the torch engine: "cuda", "cpu", "tpu" (TorchTPU, untested) or "auto". The xla engine takes what
    PJRT_DEVICE names."""
    sharding_strategy: ShardingStrategy = "hsdp"
    """How parameters, gradients and optimizer state are split: "ddp" (all replicated), "zero1" (optimizer state split),
    "zero2" (gradients too), "fsdp" (all split over all devices), "hsdp" (all split within groups of sharding_group_size
    devices, replicated across groups). fsdp needs the least memory; hsdp keeps its gathers within a host; zero1 gathers
    parameters once a step instead of twice a pass, where they fit whole; ddp is for models small beside the device.
    The torch engine splits parameters between steps with all but ddp. Any case."""
    sharding_group_size: Annotated[int, AtLeast(0), Needs("sharding_strategy", "hsdp")] = 0
    """hsdp: data-parallel ranks per sharding group, a divisor of devices / (tensor_parallel_size x
    context_parallel_size). 0: those of one host."""
    tensor_parallel_size: Annotated[int, AtLeast(1)] = 1
    """Devices that share every matrix product: heads, feed-forward channels and vocabulary are split over them, and the
    activations are added up twice a block. Neighbouring devices, best within a host. For models whose layers, or whose
    smallest batch, are too large for one device. A divisor of num_attention_heads and intermediate_size;
    on the torch engine of num_kv_heads and vocab_size too. 1: none."""
    sequence_parallel: bool = False
    """With tensor_parallel_size: between matrix products the tokens of a row are split over the tensor ranks too, so
    that norms and residuals are neither held nor computed more than once."""
    context_parallel_size: Annotated[int, AtLeast(1)] = 1
    """xla engine: devices that share the tokens of a row, for sequences whose activations are too large for one device;
    keys and values are gathered for attention. Parameters are split over them as over data-parallel ranks. 1: none."""
    kv_replication: Annotated[int, AtLeast(0)] = 0
    """xla engine: copies of each key/value head, used side by side where they are fewer than tensor ranks; each is
    stored once. 0: as few as possible, tensor_parallel_size / gcd(num_kv_heads, tensor_parallel_size). 1 without
    enough heads: every tensor rank computes all key/value heads."""
    pipeline_parallel_size: Annotated[int, AtLeast(1)] = 1
    """Groups of devices that each hold some of the layers. Training has none yet: above 1 is for plan alone."""
    virtual_pipeline_size: Annotated[int, AtLeast(1)] = 1
    """Pieces of the layers that each pipeline group holds. Training has none yet: above 1 is for plan alone."""
    dump_sharding: str = ""
    """File to write, before the first step, as JSON: the mesh and, of every parameter and moment, shape, dtype and the
    mesh axes that split each dimension. Empty: none."""
    low_cpu_fsdp: Annotated[bool, Resume.FREE] = False
    """True: the model is built on the meta device and each shard is made in place, so host memory grows by one
    parameter at a time. False: the whole model is built in host memory first. The initial weights are the same."""
    cpu_offload: bool = False
    """CUDA only: parameters, gradients and optimizer state live in host memory (FSDP2's offload policy)."""
    collective_timeout: Annotated[int, AtLeast(1), Resume.FREE] = 600
    """torch engine: seconds a collective may wait for a peer before the run ends with an error, at least 1."""

    # ---- Precision
    mixed_precision: bool = True
    """True: parameters and optimizer state in fp32, matrix products and activations in bf16, gradients reduced in
    fp32. False: everything in fp32."""
    precision: Literal["auto", "fp32", "mixed_bf16", "mixed_bf16_sr", "bf16_sr", "autocast", "fp16", "manual"] = "auto"
    """Refines mixed_precision: "auto" (mixed_bf16 if mixed_precision, else fp32), "fp32", "mixed_bf16",
    "mixed_bf16_sr" (the bf16 copy of the parameters that products read is rounded stochastically), "bf16_sr"
    (parameters, gradients and optimizer state in bf16, no fp32 copy; what the optimizer writes is rounded
    stochastically), "autocast" (products in bf16, everything between them in fp32, as torch.autocast does), "fp16"
    (as mixed_bf16 with fp16 in place of bf16 and the loss scale below; torch engine) or "manual" (mixed_bf16 with the
    three settings below). A pair that contradicts is an error."""
    master_weights: Annotated[bool | None, Needs("precision", "manual")] = None
    """precision=manual: keep parameters and optimizer state in fp32. False: in bf16. None: True."""
    fp32_grad_acc: Annotated[bool | None, Needs("precision", "manual")] = None
    """precision=manual: add up the gradients of micro-batches in fp32. False: in bf16. None: True."""
    stochastic_rounding: Annotated[bool | None, Needs("precision", "manual")] = None
    """precision=manual: round to bf16 stochastically, in the mean exactly; deterministic, the same on every mesh. None:
    False, to nearest."""
    loss_scale: Annotated[float, AtLeast(0), Needs("precision", "fp16")] = 0.0
    """precision=fp16: what the loss is multiplied by before the backward pass, so that small gradients survive. 0:
    dynamic, halved when gradients overflow (that step is left out) and doubled after loss_scale_window without."""
    initial_scale_power: Annotated[int, AtLeast(0, below=33), Needs("precision", "fp16")] = 16
    """precision=fp16, dynamic: the first scale is 2 to this power."""
    loss_scale_window: Annotated[int, AtLeast(1), Needs("precision", "fp16")] = 1000
    """precision=fp16, dynamic: steps without an overflow after which the scale doubles, at least 1."""
    loss_scale_hysteresis: Annotated[int, AtLeast(1), Needs("precision", "fp16")] = 2
    """precision=fp16, dynamic: overflows before the scale is halved, at least 1; counted anew when it doubles."""
    min_loss_scale: Annotated[float, Above(0), Needs("precision", "fp16")] = 1.0
    """precision=fp16, dynamic: the smallest scale; overflows at it count for max_skipped_steps."""
    reduce_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the gradients' sum over devices: "fp32", "bf16" or "auto". torch engine: auto is fp32. xla engine: auto alone,
    which is the parameters' dtype."""

    # ---- Activation checkpointing
    fsdp_activation_checkpointing: bool = False
    """Recompute the activations of the blocks that selective_checkpointing chooses in the backward pass, instead of
    keeping them."""
    selective_checkpointing: Annotated[str, BLOCKS] = "1"
    """Which blocks: an integer k (every k-th block; 1 is all) or a fraction between 0 and 1, as "1/3" or "0.5"
    (that share of the blocks, evenly spaced and centred)."""
    checkpoint_granularity: Annotated[Literal["full", "selective"], Needs("fsdp_activation_checkpointing")] = "full"
    """What of a chosen block is recomputed: "full" (all of it), or "selective" (the modules that checkpoint_modules
    names; of the rest, what is cheap beside its memory)."""
    checkpoint_modules: Annotated[str, MODULES, Needs("checkpoint_granularity", "selective")] = ""
    """checkpoint_granularity=selective: "mlp", "norm", "mlp_activation" (the activation and its product with the gate)
    and "core_attention", comma-separated. Scores of attention are recomputed in any case: they are never kept."""
    checkpoint_num_layers: Annotated[int, AtLeast(1), Needs("fsdp_activation_checkpointing")] = 1
    """checkpoint_granularity=full with every block chosen: blocks that are recomputed together from the input of the
    first, which alone is kept."""

    # ---- Optimizer and schedule
    optimizer: Annotated[str, OneOf(OPTIMIZERS), Resume.STATE] = "adamw"
    """"adamw", "adamw_fp32" (NxD Core's), "adam" (decay added to the gradient), "adamax", "adadelta", "adagrad",
    "rmsprop", "rprop", "sgd", "novograd", "adafactor", "sm3", "madgrad_wd", "lion" or "muon" (the matrices of the
    blocks; all else AdamW)."""
    optimizer_args: Annotated[str, ARGUMENTS, Resume.STATE] = ""
    """The optimizer's own settings, comma-separated: momentum=0.9,nesterov=True. Their names and defaults are in the
    table of optimizers in configs.md."""
    learning_rate: Annotated[float | None, Above(0), Resume.RATE] = None
    """Peak learning rate, above 0. None: the optimizer's default, 3e-4 for adamw."""
    adam_beta1: Annotated[float | None, AtLeast(0, below=1)] = None
    """Decay of the first moment, in [0, 1), of optimizers that have one. None: the optimizer's default, 0.9 for
    adamw."""
    adam_beta2: Annotated[float | None, AtLeast(0, below=1)] = None
    """Decay of the second moment, in [0, 1). None: the optimizer's default, 0.95 for adamw."""
    optimizer_eps: Annotated[float | None, Above(0)] = None
    """What is added to a denominator, above 0. None: the optimizer's default, 1e-8 for adamw."""
    weight_decay: Annotated[float | None, AtLeast(0)] = None
    """Weight decay, at least 0: per unit of learning rate, or added to the gradient by optimizers whose source does so.
    None: the optimizer's default, 0.1 for adamw."""
    norm_weight_decay: bool = False
    """Decay norm weights and biases too."""
    grad_clip_thresh: Annotated[float, AtLeast(0)] = 1.0
    """Global L2 norm above which gradients are scaled down. 0: never."""
    grad_clip_norm_type: Annotated[float, AtLeast(1, special=0)] = 2.0
    """The norm that is reported and clipped by: p of the p-norm over all gradients, at least 1; 0 is the largest."""
    training_stage: Annotated[Literal["initial", "annealing"], Resume.RATE] = "initial"
    """fms-fsdp's name for two schedules: "initial" leaves lr_schedule as it is, "annealing" is
    lr_schedule=fms_annealing."""
    lr_schedule: Annotated[str, OneOf(SCHEDULES), Resume.RATE] = "fms_cosine"
    """Curve of the learning rate. fms-fsdp's: "fms_cosine" (quadratic warm-up over min(2000, num_steps // 20) steps,
    then a cosine to 10 % of the peak), "fms_annealing" (linear from the peak towards 0). NeMo's: "constant", "cosine",
    "linear_warmup_decay", "warmup_hold", "warmup_annealing", "square", "square_root", "inverse_sqrt", "noam",
    "noam_hold", "poly", "poly_hold", "step", "exponential_lr". GPT-NeoX's: "neox_linear", "neox_cosine",
    "neox_exponential", and as they were in 2022, "neox2022_linear", "neox2022_cosine", "neox2022_exponential". "wsd":
    warm-up, lr_hold_steps at the peak, a straight line to min_lr."""
    lr_warmup_steps: Annotated[int | None, AtLeast(0), Resume.RATE] = None
    """Optimizer steps of the warm-up, at least 0 and fewer than the schedule has. None: lr_warmup_ratio, or none.
    fms_cosine has its own rule."""
    lr_warmup_ratio: Annotated[float | None, AtLeast(0, below=1), Resume.RATE] = None
    """The warm-up as a share of the schedule's steps, in [0, 1); instead of lr_warmup_steps."""
    lr_decay_steps: Annotated[int | None, AtLeast(1), Resume.RATE] = None
    """Optimizer steps that the schedule is laid over; later ones keep its last rate. None: num_steps."""
    lr_hold_steps: Annotated[int, AtLeast(0), Resume.RATE] = 0
    """Optimizer steps at the peak after the warm-up: warmup_hold, noam_hold, poly_hold, wsd."""
    lr_constant_steps: Annotated[int, AtLeast(0), Resume.RATE] = 0
    """cosine: optimizer steps at min_lr before the schedule's end; the cosine ends before them."""
    min_lr: Annotated[float, AtLeast(0), Resume.RATE] = 0.0
    """Lowest learning rate of the schedule, at most learning_rate. fms_cosine ends at a tenth of the peak instead."""
    lr_power: Annotated[float, Above(0), Resume.RATE] = 1.0
    """poly, poly_hold: exponent of the share of the steps that is left, above 0."""
    lr_gamma: Annotated[float | None, Above(0, at_most=1), Resume.RATE] = None
    """step, exponential_lr: factor in (0, 1] by which the rate shrinks; these two need it."""
    lr_step_size: Annotated[int | None, AtLeast(1), Resume.RATE] = None
    """step: optimizer steps between two multiplications by lr_gamma, at least 1; needed there."""
    lr_decay_rate: Annotated[float, Above(0), Resume.RATE] = 0.5
    """noam_hold: exponent of the decay, above 0."""
    lr_cycle: Annotated[bool, Resume.RATE] = False
    """poly, poly_hold: begin again after the schedule's steps, with a longer decay each time."""
    lr_d_model: Annotated[int | None, AtLeast(1), Resume.RATE] = None
    """noam: width d of the factor 1 / sqrt(d), at least 1; needed there."""
    max_skipped_steps: Annotated[int, AtLeast(0)] = 0
    """Optimizer steps whose loss or gradient is not finite that may be skipped in the whole run, before training stops
    itself with exit code 3. Nothing of a skipped step reaches the parameters."""

    # ---- Adapters
    lora_rank: Annotated[int, AtLeast(0), Resume.STATE] = 0
    """Rank r of an adapter beside each of lora_target_modules: y = W x + s B A x, where A and B alone are trained and W
    stays as ckpt_load_path (or the seed) gave it. 0: none, everything is trained."""
    lora_alpha: Annotated[float, Above(0), Needs("lora_rank")] = 8.0
    """s = lora_alpha / lora_rank, above 0."""
    lora_use_rslora: Annotated[bool, Needs("lora_rank")] = False
    """s = lora_alpha / sqrt(lora_rank)."""
    lora_dropout: Annotated[float, AtLeast(0, below=1), Needs("lora_rank")] = 0.0
    """Share of an adapter's input that training drops, in [0, 1)."""
    lora_target_modules: Annotated[str, Needs("lora_rank"), Resume.STATE] = ""
    """Projections with an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, comma-separated, or a
    regular expression for their paths, such as .*(q|v)_proj. Empty: q_proj,v_proj."""
    lora_bias: Annotated[Literal["none", "all", "lora_only"], Needs("lora_rank"), Resume.STATE] = "none"
    """Biases that are trained too: "none", "all", or "lora_only" (those of projections with an adapter)."""
    lora_modules_to_save: Annotated[str, Needs("lora_rank"), Resume.STATE] = ""
    """Further modules that are trained whole, comma-separated: lm_head, embed_tokens, norm."""
    lora_init: Annotated[Literal["default", "gaussian"], Needs("lora_rank")] = "default"
    """Of A: "default" (uniform within 1 / sqrt(inputs)) or "gaussian" (deviation 1 / lora_rank). B starts at 0."""
    lora_save_mode: Annotated[Literal["adapter", "base_and_adapter", "merged"], Needs("lora_rank"), Resume.STATE] = (
        "adapter"
    )
    """"adapter": checkpoints hold what is trained, and go on from ckpt_load_path's weights. "base_and_adapter",
    "merged": all. python -m pretraining.checkpoint.convert then writes PEFT's files, or both, or W + s B A in Hugging
    Face's format."""
    lora_load_path: Annotated[str, Needs("lora_rank")] = ""
    """Folder of an adapter in PEFT's format (adapter_model.safetensors) to start from. Empty: a new one."""
    lora_load_tag: Annotated[str, Needs("lora_rank")] = ""
    """Sub-folder of lora_load_path. Empty: none."""

    # ---- Batch and length
    batch_size: Annotated[int, AtLeast(1)] = 2
    """Sequences per data-parallel rank in one forward and backward pass (the micro-batch), at least 1. A rank is
    tensor_parallel_size x context_parallel_size devices, one without them."""
    global_batch_size: Annotated[int | None, AtLeast(1)] = None
    """Sequences per optimizer step over all devices, a multiple of batch_size x ranks; the quotient is the number of
    gradient accumulation passes. None: batch_size x ranks x gradient_accumulation_steps."""
    gradient_accumulation_steps: Annotated[int | None, AtLeast(1)] = None
    """Passes per optimizer step. None: derived from global_batch_size, or 1."""
    seq_length: Annotated[int, AtLeast(1)] = 4096
    """Tokens per sequence, at least 1."""
    num_steps: Annotated[int, AtLeast(1)] = 1_000_000
    """Optimizer steps of the whole run, at least 1. The learning rate's curve is laid over them."""
    seed: Annotated[int, AtLeast(0, below=2**63)] = 2023
    """Seed of the initial weights and of the order of the data, at least 0."""

    # ---- Data
    use_dummy_dataset: bool = False
    """Train on a deterministic stream of counters, for performance runs. Neither saves nor resumes unless
    checkpoint_interval is given."""
    data_path: Annotated[str, Resume.FREE] = ""
    """Folder of token shards: one sub-folder per dataset, or the shards themselves."""
    datasets: str = ""
    """Sub-folders of data_path to mix. Empty: all of them, or data_path itself where it holds shards."""
    weights: Annotated[str, WEIGHTS] = ""
    """Share of each dataset in the mixture, by tokens, in the order of datasets; normalised. Empty: by size."""
    logical_shards: Annotated[int, AtLeast(1)] = 1024
    """Lanes of neighbouring sequences that an epoch of a dataset is divided into; one sequence is taken from each lane
    in turn, so consecutive sequences come from different places of the data. At least 1; need not divide anything."""
    tokenizer_path: str = ""
    """The tokenizer that made the tokens: a sentencepiece model or a tokenizer.json. Training does not read it;
    pretraining.generate does, to turn a prompt into tokens and back. Empty: none."""
    sep_token: Annotated[int | None, AtLeast(0)] = None
    """Token id put after every document. None: the one that preparation recorded in meta.json next to the shards,
    otherwise 1, as in fms-fsdp."""
    eos_token: Annotated[int | None, AtLeast(0)] = None
    """fms-fsdp's newer name of sep_token; give one of the two."""
    bos_token: Annotated[int | None, AtLeast(0)] = None
    """Token id put before every document. None: none."""
    bol_token: Annotated[int | None, AtLeast(0)] = None
    """Token id at the first place of every sequence. None: none."""
    eol_token: Annotated[int | None, AtLeast(0)] = None
    """Token id that is the last label of every sequence, in place of the stream's next token. None: none."""
    strip_tokens: Annotated[str, TOKENS] = ""
    """Token ids, comma-separated: one of them at the beginning of a document and one at its end are removed, so that
    separators that are already in the data are not repeated."""
    file_type: Literal["auto", "arrow", "parquet", "megatron"] = "auto"
    """Shards to read: "arrow" (IPC files and streams), "parquet", "megatron" (.idx next to .bin) or "auto": all of
    them, recognised by their content."""
    col_name: str = "tokens"
    """Column of Arrow and Parquet shards that holds the token ids."""
    split: Annotated[str, SPLIT] = ""
    """Shares of every dataset's documents for training, validation and test, on any scale, such as "949,50,1". Empty:
    all for training."""
    max_samples: Annotated[int | None, AtLeast(1)] = None
    """Documents taken of every dataset for training, from its beginning, at least 1. None: all."""
    num_epochs: Annotated[int | None, AtLeast(1)] = None
    """Passes over the data, at least 1; training ends there if num_steps is not reached before. None: as many as
    num_steps needs."""
    shuffle: Literal["shards", "none"] = "shards"
    """"shards": another order of all documents in each epoch. "none": the order in which they are stored."""
    eod_mask_loss: bool = False
    """Exclude from the loss the prediction of the token after a separator."""
    reset_position_ids: bool = False
    """Count positions from 0 in every document of a sequence."""
    reset_attention_mask: bool = False
    """Attend only within a document."""
    index_dir: str = ""
    """Folder of the shards' indexes (12 bytes a document; of Parquet shards the decoded tokens too), which are built
    once. Empty: pretraining/token_index in $XDG_CACHE_HOME, otherwise in ~/.cache."""
    verify_data: bool = False
    """Compare every shard with its checksum before training, which reads every byte: with those in meta.json, and for
    other shards with those recorded when they were verified for the first time."""
    accept_data_changes: bool = False
    """Continue although the data, its mixture or its order is not what the checkpoint was trained on: a new mixture
    begins at that step, and the change is recorded. False: an error that lists what changed."""
    num_workers: Annotated[int, AtLeast(1), Resume.FREE] = 1
    """Threads that read batches ahead, at least 1. The order of the data does not depend on it."""

    # ---- Validation
    valid_data_path: str = ""
    """Folder of held-out token shards, laid out like data_path. Where val_interval is set, this or split is needed,
    except for use_dummy_dataset."""
    valid_datasets: str = ""
    """Sub-folders of valid_data_path. Empty: all of them, or valid_data_path itself where it holds shards."""
    valid_weights: Annotated[str, WEIGHTS] = ""
    """Share of each of valid_datasets, like weights. Empty: by size."""
    val_interval: Annotated[int, AtLeast(0)] = 0
    """Optimizer steps between validations; a last one follows the final step. 0: none."""
    val_steps: Annotated[int, AtLeast(0, special=-1)] = 0
    """Global batches per validation, needed where val_interval is set; no more than the validation data hold once.
    -1: all of them."""
    val_sanity_steps: Annotated[int, AtLeast(0, special=-1), Needs("val_interval")] = 0
    """Global batches of a validation before the first step, written as step 0. 0: none; -1: as many as val_steps."""
    drop_last_val: bool = True
    """True: what is left of the validation or test data after the last whole global batch is not read. False: it is,
    in a batch whose other rows do not count."""
    test_data_path: str = ""
    """Folder of token shards for the test at the end, laid out like data_path. Where test_steps is set, this or the
    third share of split is needed, except for use_dummy_dataset."""
    test_steps: Annotated[int, AtLeast(0, special=-1)] = 0
    """Global batches of the test after the last step, written as test_loss. 0: no test; -1: all of the test data."""

    # ---- Checkpoints
    ckpt_load_path: Annotated[str, Resume.FREE] = ""
    """Start from this when ckpt_save_path holds no checkpoint: a run folder, its checkpoints folder, one of its step_N
    folders, or a folder in Hugging Face's format (config.json and safetensors; weights only). Weights and optimizer
    are taken, the step starts at 0. A path that holds nothing of the kind is an error."""
    ckpt_save_path: Annotated[str, Resume.FREE] = ""
    """Folder of this run's checkpoints, step_N each. Empty: <log_dir>/checkpoints. A checkpoint found in it wins over
    ckpt_load_path: the run continues."""
    checkpoint_interval: Annotated[int, AtLeast(0, special=-1), Resume.FREE] = -1
    """Optimizer steps between checkpoints; the last step is always saved. 0: never save, not even on a signal. -1:
    10000, or 0 with use_dummy_dataset."""
    checkpoint_scale: Annotated[Literal["linear", "log"], Resume.FREE] = "linear"
    """"linear": every checkpoint_interval steps. "log": at step 1 and at every power of checkpoint_interval, which is
    then at least 2."""
    extra_checkpoint_steps: Annotated[str, STEPS, Resume.FREE] = ""
    """Further steps to save at, comma-separated; 0 is the state before the first step."""
    keep_last_n_checkpoints: Annotated[int, AtLeast(0), Resume.FREE] = 0
    """Committed checkpoints to keep; older ones are removed after a save. 0: all."""
    resume: Annotated[Literal["auto", "must", "never"], Resume.FREE] = "auto"
    """"auto": continue from the newest checkpoint in ckpt_save_path if there is one, from the one before if that is
    damaged; "must": an error if there is none or it is damaged; "never": an error if there is one."""
    load_weights_only: Annotated[bool, Needs("ckpt_load_path"), Resume.FREE] = False
    """Of ckpt_load_path take the weights and start with a fresh optimizer."""
    strict_load: Annotated[bool, Resume.FREE] = True
    """The tensors of ckpt_load_path must be exactly the model's, and its norm_eps and rotary settings this run's.
    False: the tensors that both have are loaded, and all that differs is named."""
    override_lr_on_resume: Annotated[bool, Resume.FREE] = False
    """Continue with another learning rate than the checkpoint was trained with; without it that is an error."""
    save_optimizer: Annotated[bool, Resume.FREE] = True
    """False: save weights only. A run that continues from such a checkpoint starts with fresh moments."""
    checkpoint_dtype: Annotated[Literal["auto", "fp32", "bf16"], Resume.FREE] = "auto"
    """Floating dtype on disk: "auto" (as in memory), "fp32" or "bf16". With bf16 a continued run is not the
    uninterrupted one bit for bit."""
    async_checkpointing: Annotated[bool, Resume.FREE] = False
    """Training waits only until its state is copied to host memory; the next save and the end of the run wait for the
    disk. Needs as much free host memory as this host's share of a checkpoint."""
    ckpt_io_workers: Annotated[int, AtLeast(1), Resume.FREE] = 8
    """Threads that hash and write, or read and check, a checkpoint in each process; at least 1. The files are the same
    for any number."""
    ckpt_max_failures: Annotated[int, AtLeast(1), Resume.FREE] = 3
    """Saves in a row that may fail (a full disk, say) before the run stops itself, at least 1. The last good checkpoint
    stays as it is."""

    # ---- Logging and profiling
    run_name: Annotated[str, Resume.FREE] = ""
    """Name of the run. Empty: model_variant."""
    log_dir: Annotated[str, Resume.FREE] = ""
    """Folder of config.json, metrics.jsonl, tensorboard/, profile/. Empty: runs/<run_name>."""
    report_interval: Annotated[int, AtLeast(1), Resume.FREE] = 100
    """Optimizer steps between reports (a progress line and a line of metrics.jsonl), at least 1. The last step is
    always reported."""
    tensorboard_dir: Annotated[str, Resume.FREE] = ""
    """Folder of the TensorBoard events, written where the tensorboard package is installed. Empty:
    <log_dir>/tensorboard."""
    tracker: Annotated[Literal["", "wandb"], Resume.FREE] = ""
    """"wandb": send every report to Weights & Biases too (needs the wandb package). Empty: none."""
    tracker_dir: Annotated[str, Resume.FREE] = ""
    """Folder of the tracker's own files. Empty: log_dir."""
    tracker_project_name: Annotated[str, Resume.FREE] = "llama"
    """Project that the tracker files the run under."""
    tracker_run_id: Annotated[str, Resume.FREE] = ""
    """Tracker's id of the run, to continue one that it knows. Empty: the name of log_dir."""
    log_grad_norm: Annotated[bool, Resume.FREE] = True
    """Report the gradients' norm before clipping, which costs nothing: clipping needs it."""
    log_param_norm: Annotated[bool, Resume.FREE] = False
    """Report param_norm too: the L2 norm of all parameters, each counted once however it is split or shared."""
    log_step_timing: bool = False
    """Report where the time between two reports went, in seconds: data_wait_seconds (always reported),
    train_seconds, validation_seconds and checkpoint_seconds."""
    step_timeout: Annotated[int, AtLeast(0)] = 0
    """Seconds after which a step that has not ended prints the stack of every thread, to tell where it hangs.
    0: never."""
    use_profiler: Annotated[bool, Resume.FREE] = False
    """Write a trace of profile_num_steps steps to <log_dir>/profile."""
    profiler_rank0_only: Annotated[bool, Resume.FREE] = True
    """True: only process 0 writes a trace. False: every process does."""
    profile_start_step: Annotated[int, AtLeast(1), Resume.FREE] = 5
    """First traced step, 1-based."""
    profile_num_steps: Annotated[int, AtLeast(1), Resume.FREE] = 3
    """Traced steps, at least 1."""
    memory_profiling: Annotated[bool, Needs("use_profiler"), Resume.FREE] = False
    """torch engine on CUDA, with use_profiler: also record who holds memory in the traced steps, to
    <log_dir>/profile/memory_<process>.pickle, which pytorch.org/memory_viz shows."""
    use_torch_compile: bool = True
    """torch engine on CUDA: compile each block. The xla engine always compiles; CPUs run eagerly."""
    compile_cache_dir: Annotated[str, Resume.FREE] = ""
    """Folder of the persistent compilation cache of XLA (TPU only: the CPU backend cannot read it back). Empty: off."""

    # ---- Plan
    plan: Annotated[bool, Resume.FREE] = False
    """Print what this configuration holds, sends and takes on plan_devices of plan_device_kind, and stop: paths and
    devices are not looked at. Exit code 0 whether or not it fits."""
    plan_devices: Annotated[int, AtLeast(0), Needs("plan"), Resume.FREE] = 0
    """Devices to plan for, at least 1; needed with plan. 0: as many as plan_topology has."""
    plan_device_kind: Annotated[str, OneOf(("", *PLAN_KINDS)), Needs("plan"), Resume.FREE] = ""
    """Their kind: tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e, trn1, trn2 (a core each), a100-40, a100-80, h100, h200, b200."""
    plan_search: Annotated[bool, Needs("plan"), Resume.FREE] = False
    """With plan: rank the meshes that fit by their predicted step time, for the same global batch."""
    plan_compile: Annotated[bool, Needs("plan"), Resume.FREE] = False
    """With plan: also have the step compiled for plan_topology by the TPU's own compiler, and show its memory,
    collectives and operations beside the plan's. Needs no TPU; needs requirements-tpu-aot.txt."""
    plan_topology: Annotated[str, Needs("plan"), Resume.FREE] = ""
    """Slice of TPUs, chips along each axis: 4x4 (v5e, v6e) or 4x4x4 (v4, v5p). Their product is plan_devices."""
    plan_json: Annotated[str, Needs("plan"), Resume.FREE] = ""
    """File to write the plan to, as JSON. Empty: none."""

    # ---- Configuration files
    config_file: str = ""
    """File of settings with these names, under the flags of the command line: TOML, YAML, or the config.json of a run.
    Empty: none."""
    import_config: str = ""
    """Configuration file of NxD Training, NeMo Megatron or GPT-NeoX to train with, under the flags of the command line;
    several files of GPT-NeoX are comma-separated. What each key came to is printed first. Empty: none."""
    import_format: Literal["auto", "nxdt", "nemo", "neox"] = "auto"
    """Whose file import_config is: "nxdt", "nemo", "neox", or "auto", told by its keys."""
    import_strict: bool = True
    """Keys of import_config that this recipe cannot follow stop the run. False: each is a warning, and training goes
    on without it."""
    import_only: bool = False
    """Resolve the configuration, print it and the report of import_config, and stop: paths and devices are not looked
    at."""
    import_report: str = ""
    """File to write the report of import_config to, as JSON. Empty: none."""
    import_lr_steps: Annotated[str, STEPS] = ""
    """Steps, counted from 0 and comma-separated, whose learning rate the report of import_config lists. Empty: the
    first, the end of the warm-up, the middle and the last."""
    import_pp: Literal["keep", "fold"] = "keep"
    """Pipeline stages of import_config: "keep" them, or "fold" their devices into data parallelism, which changes no
    loss."""
    source_world_size: Annotated[int | None, AtLeast(1)] = None
    """Devices that import_config was made for, which the global batch of a GPT-NeoX file follows from. None: what the
    file says."""
    neox_era: Literal["auto", "2022", "head"] = "auto"
    """Defaults and learning rates of a GPT-NeoX file: those of "2022", of "head" (today), or "auto", told by its
    keys."""
    neox_gated_ffn: Literal["auto", "head", "legacy"] = "auto"
    """Feed-forward width of a GPT-NeoX file with a gated activation: "auto" and "head" take today's two thirds,
    "legacy" the width as written before September 2024."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch; global_batch_size must be known, as it is once an engine is open."""
        assert self.global_batch_size is not None
        return self.global_batch_size * self.seq_length

    @property
    def run_folder(self) -> Path:
        """Folder that this run writes to: log_dir, or runs/<run_name>."""
        return Path(self.log_dir or f"runs/{self.run_name or self.model_variant}")

    @property
    def reads_data(self) -> bool:
        """Whether the run gets as far as opening data and paths: `plan` and `import_only` stop before."""
        return not (self.plan or self.import_only)

    @property
    def precision_mode(self) -> str:
        """`precision`, with "auto" resolved by mixed_precision."""
        if self.precision != "auto":
            return self.precision
        return "mixed_bf16" if self.mixed_precision else "fp32"

    def __post_init__(self) -> None:
        """Replace defaults that stand for another value; a frozen dataclass has no other way to."""
        derived: dict[str, object] = {"sharding_strategy": self.sharding_strategy.lower()}  # fms-fsdp documents FSDP
        if self.checkpoint_interval == -1:
            derived["checkpoint_interval"] = 0 if self.use_dummy_dataset else 10_000
        if self.training_stage.lower() == "annealing" and self.lr_schedule == "fms_cosine":
            derived["lr_schedule"] = "fms_annealing"
        vars(self).update(derived)


SETTINGS = declared_settings(TrainConfig)
