"""What a recipe says: frozen dataclasses that refuse nonsense. Nothing here imports torch."""

import re
from dataclasses import dataclass, field

from ict.reading import parse_duration, require

POINTS = (1, 2)  # pixels a side and channels of what is not an image: points of the plane
NATURAL = {"digits": (8, 1), "cifar10": (32, 3), "imagenet64": (64, 3), "mixture2d": POINTS}  # of named sets
FEEDS = ("auto", "resident", "stream")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """[data] What to learn."""

    source: str = "digits"  # a name, a path (folder, .zip, .tar, shard-{000..127}.tar, .npz), or hf:owner/name
    path: str = ""  # where cifar10 or imagenet64 is
    split: str = "train"  # which part of a set that has several: cifar10 has train and test
    image_size: int = 8
    channels: int = 1
    classes: int = 0  # how many classes the model is told apart by; 0: not conditioned on a class
    flip: bool = False  # mirror half of the images
    fit: str = "crop"  # how an image becomes square: "crop" its centre, or "pad" it
    background: int = 255  # grey under transparent pixels and beside padded ones
    feed: str = "auto"  # "resident": the whole set on the device; "stream": batch by batch; "auto": by its size

    def __post_init__(self) -> None:
        if (self.image_size, self.channels) != POINTS:
            require(4 <= self.image_size <= 1024, f"data.image_size = {self.image_size}: use 4 to 1024 pixels")
            require(self.channels in (1, 3), f"data.channels = {self.channels}: use 1 (grey) or 3 (colour)")
        require(self.fit in ("crop", "pad"), f'data.fit = {self.fit!r}: use "crop" or "pad"')
        require(self.feed in FEEDS, f"data.feed = {self.feed!r}: use {', '.join(FEEDS)}")
        require(0 <= self.background <= 255, f"data.background = {self.background}: use 0 (black) to 255 (white)")
        require(self.classes >= 0, f"data.classes = {self.classes}: use 0 (none) or the number of classes")


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """[noise] Noise levels and preconditioning (§2)."""

    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    sigma_data: float = 0.5

    def __post_init__(self) -> None:
        limits = {"sigma_min": (1e-9, 1e6), "sigma_max": (1e-9, 1e6), "rho": (0.1, 1000.0), "sigma_data": (1e-6, 1e6)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            require(low <= value <= high, f"noise.{name} = {value}: use {low:g} to {high:,.0f}")
        require(
            self.sigma_min < self.sigma_max,
            f"noise.sigma_min = {self.sigma_min} must be below noise.sigma_max = {self.sigma_max}",
        )


@dataclass(frozen=True, kw_only=True)
class NetConfig:
    """[net] The network F."""

    kind: str = "unet"
    channels: int = 64
    multipliers: tuple[int, ...] = (1, 2)
    blocks: int = 2
    attention: tuple[int, ...] = ()  # sizes of the feature maps that get attention, in pixels
    head_channels: int = 64  # channels of an attention head; 0: one head
    dropout: float = 0.0
    dropout_max_size: int | None = None  # only where the feature map has at most so many pixels a side
    scale_shift: bool = False  # adm: the embedding scales and shifts a norm (AdaGN), which hurts iCT
    embedding: str = "fourier"
    fourier_scale: float = 0.02
    positional_scale: float = 1000.0  # factor of ¼ ln σ before the positional embedding
    intervals: bool = False  # the net is also told how far to go, as meanflow needs it

    def __post_init__(self) -> None:
        require(
            8 <= self.channels <= 4096 and self.channels % 8 == 0,
            f"net.channels = {self.channels}: use a multiple of 8, at most 4096",
        )
        require(
            0 < len(self.multipliers) <= 8 and 1 <= min(self.multipliers) <= max(self.multipliers) <= 64,
            f"net.multipliers = {list(self.multipliers)}: give 1 to 8 whole numbers from 1 to 64, one a resolution",
        )
        require(1 <= self.blocks <= 64, f"net.blocks = {self.blocks}: use 1 to 64")
        require(not self.scale_shift or self.kind == "adm", "net.scale_shift is for net.kind = adm alone: remove it")
        require(self.head_channels >= 0, f"net.head_channels = {self.head_channels}: use 0 (one head) or more")
        require(
            self.dropout_max_size is None or self.dropout_max_size >= 1,
            f"net.dropout_max_size = {self.dropout_max_size}: use at least 1, or leave it out for dropout everywhere",
        )
        require(0 <= self.dropout < 1, f"net.dropout = {self.dropout}: use a rate from 0 to below 1")
        require(self.fourier_scale > 0, f"net.fourier_scale = {self.fourier_scale}: must be above 0 (iCT: 0.02)")
        require(self.positional_scale > 0, f"net.positional_scale = {self.positional_scale}: must be above 0")

    def dropout_at(self, size: int) -> float:
        """The dropout rate of a block whose feature map has `size` pixels a side (appendix B)."""
        return self.dropout if self.dropout_max_size is None or size <= self.dropout_max_size else 0.0


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """[objective] What is minimised (§3)."""

    kind: str = "ict"
    curriculum: str = "exponential"
    s0: int = 10
    s1: int = 1280
    index: str = "lognormal"
    p_mean: float = -1.1
    p_std: float = 2.0
    weighting: str = "inverse_gap"
    gap_power: float = 1.0  # of inverse_gap: λ = 1 / (σ_{i+1} − σ_i)^p; 1 in the paper
    distance: str = "pseudo_huber"
    c: float | None = None  # of pseudo_huber; left out: 0.00054 · √d
    lpips_net: str = "vgg16"  # of lpips: "vgg16" or "alexnet"
    lpips_weights: str = ""  # of lpips: their file, if not in the cache
    score: str = "sample"  # of ict and ect: a sample's own noise (the paper), or "data": the mean over the training set
    coupling: str = "independent"  # of image and noise; "batch": among the noise of a batch, near to the image
    couple_above: float = 1.0  # of batch: only at noise levels above this; several steps add independent noise below
    teacher: str = "student"  # the lower side's weights: the "student"'s (iCT), or an average of them, "ema" (2023)
    mu0: float = 0.9  # of the average: its decay is exp(s0 log μ0 / N)
    teacher_model: str = ""  # of cd: the file of the diffusion model that is distilled
    solver: str = "heun"  # of cd: "heun" or "euler"
    stages: int = 8  # of ect: how often the pairs of levels draw nearer, evenly over the run
    q: float = 2.0  # of ect: by how much each time
    k: float = 8.0  # of ect: how much wider the pairs are at low levels,
    b: float = 1.0  # … and where that ends
    denoise: float = 0.0  # share of the run, at its start, that learns to denoise instead (a diffusion warm-up)
    warmup: float = 0.025  # of sct: share of the run in which the unstable part of the tangent is let in
    floor: float = 0.1  # of sct: c of the tangent's normalisation g / (‖g‖ + c); a large one leaves its length
    power: float | None = None  # of sct and meanflow: p of the weight 1/(loss + ε)^p; left out: 1 and 0.75
    apart: float = 0.75  # of meanflow: share of the samples whose two times differ

    def __post_init__(self) -> None:
        require(self.s0 >= 1, f"objective.s0 = {self.s0}: use at least 1")
        require(self.s1 <= 2**20, f"objective.s1 = {self.s1}: use at most {2**20} (the paper: 1280)")
        require(
            self.s0 <= self.s1,
            f"objective.s0 = {self.s0} is above objective.s1 = {self.s1}: N rises from s0 + 1 to s1 + 1",
        )
        require(
            self.teacher in ("student", "ema"),
            f'objective.teacher = {self.teacher!r}: use "student" (iCT) or "ema" (2023)',
        )
        require(
            self.teacher == "student" or self.kind in ("ict", "cd"),
            f'objective.teacher = "ema" is for objective.kind = ict and cd, not {self.kind}: leave it out',
        )
        require(1 <= self.stages <= 1000, f"objective.stages = {self.stages}: use 1 to 1000")
        require(self.q > 1, f"objective.q = {self.q}: must be above 1")
        require(self.k >= 0 and self.b >= 0, f"objective.k = {self.k}, objective.b = {self.b}: use 0 or more")
        require(
            self.coupling in ("independent", "batch"),
            f'objective.coupling = {self.coupling!r}: use "independent" (the paper) or "batch"',
        )
        require(
            self.score in ("sample", "data"), f'objective.score = {self.score!r}: use "sample" (the paper) or "data"'
        )
        require(
            self.score == "sample" or (self.kind in ("ict", "ect") and self.coupling == "independent"),
            'objective.score = "data" is for objective.kind = ict and ect, with objective.coupling = "independent"',
        )
        require(self.couple_above >= 0, f"objective.couple_above = {self.couple_above}: use 0 (all levels) or more")
        require(0 <= self.denoise < 1, f"objective.denoise = {self.denoise}: a share of the run from 0 to below 1")
        require(
            self.denoise == 0 or (self.learns == "consistency" and self.teacher == "student"),
            "objective.denoise is for consistency models that teach themselves, not for edm, meanflow or "
            'objective.teacher = "ema": leave it out',
        )
        require(0 <= self.warmup <= 1, f"objective.warmup = {self.warmup}: a share of the run from 0 to 1")
        require(self.floor > 0, f"objective.floor = {self.floor}: must be above 0 (sCT: 0.1)")
        require(self.power is None or 0 <= self.power <= 1, f"objective.power = {self.power}: use 0 (none) to 1")
        require(0 <= self.apart <= 1, f"objective.apart = {self.apart}: a share of the samples from 0 to 1")
        require(0 <= self.mu0 < 1, f"objective.mu0 = {self.mu0}: use a rate from 0 to below 1 (2023: 0.9)")
        require(0 <= self.gap_power <= 3, f"objective.gap_power = {self.gap_power}: use 0 to 3 (the paper: 1)")
        require(self.p_std > 0, f"objective.p_std = {self.p_std}: must be above 0")
        require(self.c is None or self.c > 0, f"objective.c = {self.c}: must be above 0, or left out for 0.00054·√d")

    @property
    def learns(self) -> str:
        """What a model trained so is: it decides how it is preconditioned and sampled."""
        return {"edm": "diffusion", "meanflow": "meanflow"}.get(self.kind, "consistency")


OPTIMISERS = {"radam": "RAdam", "muon": "Muon"}  # name in a recipe -> as it is written
# Keys of [training] that bound a run: one of them, not more.
BOUNDS = ("steps", "images", "budget")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """[training] How long and how. Exactly one of steps, images and budget bounds the run."""

    steps: int | None = None
    images: int | None = None
    budget: str | None = None  # wall-clock time: "90s", "3m", "1h30m"
    batch: int = 128
    accumulate: int = 1  # how many pieces a batch is cut into to save memory
    optimiser: str = "radam"  # the paper's; or "muon", which orthogonalises the steps of the net's matrices
    lr: float = 1e-4
    lr_schedule: str = "constant"
    lr_warmup: float = 0.0  # share of the run in which lr rises from 0
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    ema: tuple[float, ...] = (0.9999,)  # decay rates, all kept; the first one is the model that is used
    ema_ramp: float = 0.1  # a window never exceeds this share of the steps so far; 0 switches the ramp off
    log_every: int = 50
    snapshots: int = 8  # sample grids drawn on the way, evenly spread
    save_every: int = 1000
    keep: int = 2  # how many of the newest checkpoints stay
    keep_every: int = 0  # besides, those whose step is a multiple of this stay for good; 0: none
    rollbacks: int = 3  # times that a run which diverges goes back to a checkpoint before it gives up
    shard_optimiser: bool = False  # on several ranks: each keeps only its share of the optimiser's state (ZeRO)
    start: str = ""  # a model file whose weights the run starts from, for instance a diffusion model's
    deterministic: bool = True  # on a GPU: only kernels that give the same bits every time

    def __post_init__(self) -> None:
        given = [name for name in BOUNDS if getattr(self, name) is not None]
        require(
            len(given) <= 1, f"training.{' and training.'.join(given)} are both set: a run is bounded by one of them"
        )
        require(self.steps is None or self.steps >= 1, f"training.steps = {self.steps}: use at least 1")
        require(self.images is None or self.images >= 1, f"training.images = {self.images}: use at least 1")
        if self.budget is not None:
            parse_duration("training.budget", self.budget)
        require(1 <= self.batch <= 2**20, f"training.batch = {self.batch}: use 1 to {2**20}")
        require(
            1 <= self.accumulate <= self.batch and self.batch % self.accumulate == 0,
            f"training.accumulate = {self.accumulate} must divide training.batch = {self.batch}",
        )
        require(self.optimiser in OPTIMISERS, f"training.optimiser = {self.optimiser!r}: use {', '.join(OPTIMISERS)}")
        require(
            not self.shard_optimiser or self.optimiser == "radam",
            f"training.shard_optimiser is for radam alone, not {self.optimiser}: leave it out",
        )
        require(self.lr > 0, f"training.lr = {self.lr}: must be above 0")
        require(0 <= self.lr_warmup < 1, f"training.lr_warmup = {self.lr_warmup}: a share of the run from 0 to below 1")
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"training.betas = {list(self.betas)}: give two numbers from 0 to below 1",
        )
        require(self.eps > 0, f"training.eps = {self.eps}: must be above 0")
        require(
            len(self.ema) > 0 and all(0 <= rate < 1 for rate in self.ema) and len(set(self.ema)) == len(self.ema),
            f"training.ema = {list(self.ema)}: give one or more different rates from 0 to below 1",
        )
        require(0 <= self.ema_ramp <= 1, f"training.ema_ramp = {self.ema_ramp}: a share from 0 to 1")
        for name in ("log_every", "save_every"):
            require(getattr(self, name) >= 1, f"training.{name} = {getattr(self, name)}: use at least 1")
        require(self.keep >= 2, f"training.keep = {self.keep}: use at least 2, as the newest may be damaged")
        require(self.keep_every >= 0, f"training.keep_every = {self.keep_every}: use 0 (none) or a number of steps")
        require(0 <= self.rollbacks <= 1000, f"training.rollbacks = {self.rollbacks}: use 0 (give up at once) to 1000")
        require(0 <= self.snapshots <= 1000, f"training.snapshots = {self.snapshots}: use 0 (none) to 1000")


PRECISIONS = ("auto", "float32", "tf32", "fp16", "bf16")


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """[speed] How a GPU computes a step. Each choice can be switched off alone; a CPU does without all of them."""

    precision: str = "auto"  # of the net's trunk; "auto": the fastest that is safe at the current N
    channels_last: bool = True  # the layout that convolutions are fastest in
    kernels: bool = True  # this project's own kernels for what stands between the convolutions
    graphs: bool = True  # steps, and calls for samples on the way, are recorded (CUDA graphs) and played again
    fused_update: bool = True  # optimiser and averages in one pass over the weights
    compile: bool = False  # torch.compile of the net, which then writes its own kernels

    def __post_init__(self) -> None:
        require(self.precision in PRECISIONS, f"speed.precision = {self.precision!r}: use {', '.join(PRECISIONS)}")


STARTS = ("noise", "gaussian", "mixture")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """[sampling] How the model is best used."""

    sigma_mid: float = 0.821  # the last noise level of multistep sampling; 0.821 is the paper's for CIFAR-10
    start: str = "noise"  # where samples begin: "noise" of sigma_max, or a "gaussian" or "mixture" for noisy images
    start_sigma: float = 4.0  # the noise level of these
    start_parts: int = 64  # Gaussians of a mixture

    def __post_init__(self) -> None:
        require(self.sigma_mid > 0, f"sampling.sigma_mid = {self.sigma_mid}: must be above 0")
        require(self.start in STARTS, f"sampling.start = {self.start!r}: use noise, gaussian or mixture")
        require(self.start_sigma > 0, f"sampling.start_sigma = {self.start_sigma}: must be above 0")
        require(1 <= self.start_parts <= 1024, f"sampling.start_parts = {self.start_parts}: use 1 to 1024")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """[evaluation] Scores on the way; the model with the best one is kept as best.safetensors."""

    times: int = 0  # how often in a run, evenly spread, the last time at its end
    samples: int = 10_000
    steps: int | None = None  # network calls a sample: 1 unless given (18 steps for a diffusion model)
    features: str = ""  # what images are compared by: inception unless given; for the digits their own
    weights: str = ""  # where its weights are, if not in the cache

    def __post_init__(self) -> None:
        require(0 <= self.times <= 1000, f"evaluation.times = {self.times}: use 0 (never) to 1000")
        require(2 <= self.samples <= 10**7, f"evaluation.samples = {self.samples}: use 2 to 10 million")
        require(self.steps is None or 1 <= self.steps <= 1000, f"evaluation.steps = {self.steps}: use 1 to 1000")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole recipe."""

    name: str = "unnamed"
    about: str = ""
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    net: NetConfig = field(default_factory=NetConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, f"seed = {self.seed}: use a whole number from 0 to 2^63 - 1")
        require(
            re.fullmatch(r"[\w][\w.-]*", self.name) is not None,
            f"name = {self.name!r}: use letters, digits, '-', '_' and '.'; it names the run's folder",
        )
        require(
            self.noise.sigma_min < self.sampling.sigma_mid < self.noise.sigma_max,
            f"sampling.sigma_mid = {self.sampling.sigma_mid} must lie between noise.sigma_min = {self.noise.sigma_min} "
            f"and noise.sigma_max = {self.noise.sigma_max}",
        )
        low, start, high = self.sampling.sigma_mid, self.sampling.start_sigma, self.noise.sigma_max
        require(
            self.sampling.start == "noise" or low < start < high,
            f"sampling.start_sigma = {start} must lie between sampling.sigma_mid = {low} and noise.sigma_max = {high}",
        )
        require(
            self.sampling.start == "noise" or self.data.image_size <= 128,
            f"sampling.start = {self.sampling.start!r} is for images of up to 128 pixels a side: leave it out",
        )
        require(
            self.sampling.start == "noise" or self.objective.coupling == "independent",
            f"sampling.start = {self.sampling.start!r} stands for images with independent noise, but "
            "objective.coupling teaches another: leave one of them out",
        )
        flow = self.objective.kind == "meanflow"
        require(
            self.net.intervals or not flow,
            "objective.kind = meanflow needs a net that is told two times: set net.intervals = true",
        )
        require(flow or not self.net.intervals, "net.intervals is for objective.kind = meanflow alone: remove it")
        require(
            self.objective.coupling == "independent" or not self.data.classes,
            'objective.coupling = "batch" gives each class a noise of its own, which sampling does not know: '
            "leave it out, or set data.classes = 0",
        )
        require(
            self.objective.coupling == "independent" or self.training.batch >= 2 * self.training.accumulate,
            'objective.coupling = "batch" needs pieces of at least 2 images: lower training.accumulate',
        )
