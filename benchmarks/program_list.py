"""Which public programs public_programs.py tries: where they are, how they are run, what data they want."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from program_data import Prepare, cora, images, masks, mnist, names, text

# Repository -> the commit that is tried.
COMMITS = {
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "karpathy/makemore": "988aa59e4d8fefa526d06f3b453ad116258398d4",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    "tkipf/pygcn": "1600b5b748b3976413d1e307540ccc62605b4d6d",
    "spro/char-rnn.pytorch": "282bcb6b15ab3929d6a588b455cfc0f19f32add4",
    "milesial/Pytorch-UNet": "21d7850f2af30a9695bbeea75f3136aa538cfc4a",
}


@dataclass(frozen=True)
class Program:
    """A script, and what it wants.

    Attributes:
        name, kind: of the table.
        repository: "owner/name" of COMMITS; "" for a script of library_scripts/, in the shape of a library's pages.
        script: its path in the repository. It runs in its own folder, or in `cwd`.
        arguments: its own.
        prepare: writes its data.
        before: a script of the repository, in the same folder, that makes what it needs of those.
        packages: what pip installs for it, beside torch and NumPy.
        path: folders of the repository that are importable.
        offline: whether stand_ins/ stands for what downloads.
        settings: further arguments of the comparison.
    """

    name: str
    kind: str
    repository: str
    script: str
    arguments: str = ""
    prepare: Prepare = field(default=lambda folder: None)
    before: str = ""
    packages: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    cwd: str | None = None
    offline: bool = False
    settings: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Where it runs, in the repository."""
        return str(Path(self.script).parent) if self.cwd is None else self.cwd


def example(name: str, kind: str, arguments: str = "", script: str = "main.py", **others: object) -> Program:
    repository = "pytorch/examples"
    shown = name if script == "main.py" else f"{name}/{script}"
    return Program(f"{repository} {shown}", kind, repository, f"{name}/{script}", arguments, **others)  # type: ignore[arg-type]


VISION = ("torchvision",)
GYM = ("gymnasium",)
SHAKESPEARE = text("data/shakespeare_char/input.txt")
SMALL_GPT = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=1 --block_size=64 --n_layer=2 "
    "--n_head=4 --n_embd=64 --log_interval=1"
)
WIKITEXT = text(*(f"data/wikitext-2/{name}.txt" for name in ("train", "valid", "test")), size=40_000)
WORDS = "--epochs 1 --emsize 64 --nhid 64 --nlayers 2"

PROGRAMS = [
    Program(
        "nanoGPT",
        "GPT",
        "karpathy/nanoGPT",
        "train.py",
        SMALL_GPT,
        SHAKESPEARE,
        "data/shakespeare_char/prepare.py",
        offline=True,
    ),
    *(
        Program(
            f"makemore {kind}",
            f"{kind} over names",
            "karpathy/makemore",
            "makemore.py",
            f"--type {kind} --max-steps 40 --num-workers 0",
            names(),
            packages=("tensorboard",),
        )
        for kind in ("transformer", "rnn", "bow")
    ),
    Program(
        "minGPT chargpt",
        "GPT",
        "karpathy/minGPT",
        "projects/chargpt/chargpt.py",
        "--model.model_type=gpt-nano --data.block_size=32 --trainer.max_iters=40 --trainer.num_workers=0 "
        "--trainer.batch_size=16",
        text("input.txt"),
        path=(".",),
    ),
    Program(
        "minGPT adder",
        "GPT",
        "karpathy/minGPT",
        "projects/adder/adder.py",
        "--trainer.max_iters=40 --trainer.num_workers=0",
        path=(".",),
    ),
    example("mnist", "convnet", "--epochs 1", prepare=mnist(), packages=VISION),
    example("mnist_hogwild", "convnet, processes of its own", "--epochs 1", prepare=mnist(), packages=VISION),
    example(
        "mnist_forward_forward",
        "an optimizer a layer",
        "--epochs 12 --train_size 200 --test_size 100",
        prepare=mnist("data"),
        packages=VISION,
    ),
    example("mnist_rnn", "LSTM", "--epochs 1", prepare=mnist(), packages=VISION),
    example("siamese_network", "two branches, binary_cross_entropy", "--epochs 1", prepare=mnist(), packages=VISION),
    example("vae", "VAE, binary_cross_entropy", "--epochs 2", prepare=mnist(), packages=VISION),
    example(
        "dcgan",
        "GAN, binary_cross_entropy",
        "--dataset fake --batchSize 8 --imageSize 64 --ngf 16 --ndf 16 --niter 1 --workers 0",
        packages=VISION,
    ),
    example("word_language_model", "Transformer", f"--model Transformer --nhead 2 {WORDS}", prepare=WIKITEXT),
    example("word_language_model", "LSTM, an SGD by hand", f"--model LSTM {WORDS}", prepare=WIKITEXT),
    example("word_language_model", "LSTM, AdamW", f"--model LSTM --use-optimizer {WORDS}", prepare=WIKITEXT),
    example(
        "time_sequence_prediction",
        "LSTM, LBFGS",
        "--steps 1",
        "train.py",
        before="generate_sine_wave.py",
        packages=("matplotlib",),
    ),
    example("reinforcement_learning", "REINFORCE", "", "reinforce.py", packages=GYM),
    example("reinforcement_learning", "actor and critic", "", "actor_critic.py", packages=GYM),
    example("regression", "an SGD by hand"),
    example(
        "super_resolution",
        "convnet",
        "--upscale_factor 2 --batchSize 4 --nEpochs 3 --threads 0",
        prepare=images("dataset/BSDS300/images/train", "dataset/BSDS300/images/test", size=96),
        packages=(*VISION, "six"),
    ),
    example("gcn", "graph, sparse products", "--epochs 20", prepare=cora(), offline=True),
    example("gat", "graph attention", "--epochs 20 --hidden-dim 16 --num-heads 2", prepare=cora(), offline=True),
    example("imagenet", "ResNet-18", "--dummy -a resnet18 -b 2 -j 0 --epochs 1", packages=VISION),
    Program(
        "pygcn",
        "graph, sparse products",
        "tkipf/pygcn",
        "pygcn/train.py",
        "--epochs 20",
        cora("../data/cora"),
        packages=("scipy",),
        path=(".",),
    ),
    Program(
        "char-rnn.pytorch",
        "GRU over characters",
        "spro/char-rnn.pytorch",
        "train.py",
        "input.txt --n_epochs 20 --chunk_len 40 --batch_size 8",
        text("input.txt"),
        packages=("unidecode", "tqdm"),
    ),
    Program(
        "Pytorch-UNet",
        "U-Net, autocast and GradScaler",
        "milesial/Pytorch-UNet",
        "train.py",
        "--epochs 1 --batch-size 2 --scale 0.5",
        masks,
        packages=("torchvision", "wandb", "matplotlib", "tqdm"),
    ),
]
