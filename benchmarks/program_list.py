"""The public programs that public_programs.py runs, with their repositories, arguments and data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from program_data import (
    Prepare,
    classes,
    cora,
    images,
    language_model,
    masks,
    mnist,
    names,
    noise_model,
    qwen,
    small_graphs,
    text,
    words,
)

# Repository -> the commit that is run.
COMMITS = {
    "GitYCC/crnn-pytorch": "f145a61e20e57a36b8f2d642f93c9ba2890cd042",
    "HobbitLong/SupContrast": "66a8fe53880d6a1084b2e4e0db0a019024d6d41a",
    "MoonshotAI/Moonlight": "c2ad5b20c605086526a179d36901bfc41b52b44b",
    "eriklindernoren/PyTorch-GAN": "36d3c77e5ff20ebe0aeefd322326a134a279b93e",
    "huggingface/diffusers": "58eb52c0803ea9af3abec60841c2a093bdf1f951",
    "huggingface/pytorch-image-models": "aa4b5850c1543fa488abf260f18390eda46cf85d",
    "huggingface/trl": "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    "karpathy/makemore": "988aa59e4d8fefa526d06f3b453ad116258398d4",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "locuslab/TCN": "2f8c2b817050206397458dfd1f5a25ce8a32fe65",
    "lululxvi/deepxde": "99b6620386d18cefb1549dddb7b7fe468cfad607",
    "milesial/Pytorch-UNet": "21d7850f2af30a9695bbeea75f3136aa538cfc4a",
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "pytorch/opacus": "4d0ebc84613d214fbfd37fbfd1390e3747a625ce",
    "rtqichen/torchdiffeq": "657943acefa826ef04c025ebeb1ff5e9d60dc268",
    "spro/char-rnn.pytorch": "282bcb6b15ab3929d6a588b455cfc0f19f32add4",
    "tkipf/pygcn": "1600b5b748b3976413d1e307540ccc62605b4d6d",
    "vwxyzjn/cleanrl": "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    "weihua916/powerful-gnns": "9a2ce8ac3e99278307093a464a95caf0fb04b602",
    "yunjey/pytorch-tutorial": "0500d3df5a2a8080ccfccbc00aca0eacc21818db",
}


@dataclass(frozen=True)
class Program:
    """A script, and what it needs to run.

    Attributes:
        name, kind: the first two columns of the table.
        repository: "owner/name" of COMMITS; "" for a script of library_scripts/, which follows a library's examples.
        script: its path in the repository. It runs in its own folder, or in `cwd`.
        arguments: its command line.
        prepare: writes its data.
        before: a script of the same folder that is run first, to convert the data for this one.
        packages: the packages that pip installs for it, besides torch and NumPy.
        path: folders of the repository to add to the import path.
        offline: whether the modules of stand_ins/ replace packages that download and upload.
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

    @property
    def folder(self) -> str:
        """The folder of the repository in which it runs."""
        return str(Path(self.script).parent) if self.cwd is None else self.cwd

    @property
    def label(self) -> str:
        return f"{self.name} ({self.kind})"


def example(name: str, kind: str, arguments: str = "", script: str = "main.py", **others: Any) -> Program:
    shown = f"examples/{name}" if script == "main.py" else f"examples/{name}/{script.removesuffix('.py')}"
    return Program(shown, kind, "pytorch/examples", f"{name}/{script}", arguments, **others)


def of_library(name: str, kind: str, script: str, *packages: str) -> Program:
    return Program(name, kind, "", f"{script}.py", packages=packages)


VISION = ("torchvision",)
GYM = ("gymnasium",)
SMALL_GPT = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=1 --block_size=64 --n_layer=2 "
    "--n_head=4 --n_embd=64 --log_interval=1 --max_iters=20"
)
WIKITEXT = text(*(f"data/wikitext-2/{name}.txt" for name in ("train", "valid", "test")), size=40_000)
WORDS = "--epochs 1 --emsize 64 --nhid 64 --nlayers 2"
CLEANRL: dict[str, Any] = {
    "repository": "vwxyzjn/cleanrl",
    "packages": (*GYM, "tyro", "tensorboard"),
    "path": (".",),
    "cwd": "cleanrl",
}
GAN = "--n_epochs 1 --n_cpu 0"
TRL = (
    "--model_name_or_path model --max_length 32 --per_device_train_batch_size 4 --max_steps 12 "
    "--use_cpu --bf16 False --gradient_checkpointing False --report_to none --output_dir out"
)


def _of_trl(name: str, kind: str, script: str, arguments: str, *packages: str) -> Program:
    return Program(
        name,
        kind,
        "huggingface/trl",
        f"trl/scripts/{script}.py",
        f"{TRL} {arguments}",
        language_model,
        packages=("trl", "datasets", *packages),
        path=(".",),
        cwd="small",
    )


PROGRAMS = [
    Program(
        "nanoGPT",
        "GPT, autocast and a GradScaler",
        "karpathy/nanoGPT",
        "train.py",
        SMALL_GPT,
        text("data/shakespeare_char/input.txt"),
        "data/shakespeare_char/prepare.py",
        offline=True,
    ),
    *(
        Program(
            f"makemore --type {kind}",
            f"{kind} over characters",
            "karpathy/makemore",
            "makemore.py",
            f"--type {kind} --max-steps 20 --num-workers 0",
            names(),
            packages=("tensorboard",),
        )
        for kind in ("transformer", "rnn", "bow")
    ),
    Program(
        "minGPT/chargpt",
        "GPT",
        "karpathy/minGPT",
        "projects/chargpt/chargpt.py",
        "--model.model_type=gpt-nano --data.block_size=32 --trainer.max_iters=20 --trainer.num_workers=0 "
        "--trainer.batch_size=16",
        text("input.txt"),
        path=(".",),
        offline=True,
    ),
    Program(
        "minGPT/adder",
        "GPT",
        "karpathy/minGPT",
        "projects/adder/adder.py",
        "--trainer.max_iters=20 --trainer.num_workers=0",
        path=(".",),
        offline=True,
    ),
    example("mnist", "convnet", "--epochs 1", prepare=mnist(), packages=VISION),
    example("mnist_hogwild", "processes of its own", "--epochs 1", prepare=mnist(), packages=VISION),
    example(
        "mnist_forward_forward",
        "an optimizer a layer",
        "--epochs 12 --train_size 200 --test_size 100",
        prepare=mnist("data"),
        packages=VISION,
    ),
    example("mnist_rnn", "LSTM", "--epochs 1", prepare=mnist(), packages=VISION),
    example("siamese_network", "two branches, BCE", "--epochs 1 --batch-size 4", prepare=mnist(), packages=VISION),
    example("vae", "VAE, BCE", "--epochs 2", prepare=mnist(), packages=VISION),
    example(
        "dcgan",
        "GAN, BCE",
        "--dataset fake --batchSize 8 --imageSize 64 --ngf 16 --ndf 16 --niter 1 --workers 0",
        packages=VISION,
    ),
    example(
        "word_language_model", "Transformer, SGD by hand", f"--model Transformer --nhead 2 {WORDS}", prepare=WIKITEXT
    ),
    example("word_language_model", "LSTM, SGD by hand", f"--model LSTM {WORDS}", prepare=WIKITEXT),
    example("word_language_model", "LSTM, AdamW", f"--model LSTM --use-optimizer {WORDS}", prepare=WIKITEXT),
    example(
        "time_sequence_prediction",
        "LSTM, LBFGS, FP64",
        "--steps 1",
        "train.py",
        before="generate_sine_wave.py",
        packages=("matplotlib",),
    ),
    example("reinforcement_learning", "policy gradient", "", "reinforce.py", packages=GYM),
    example("reinforcement_learning", "policy gradient", "", "actor_critic.py", packages=GYM),
    example("regression", "SGD by hand"),
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
    of_library("timm, ViT", "vision transformer", "timm_vit", "torchvision", "timm"),
    of_library("timm, ConvNeXt", "convnet, average of weights", "timm_convnext", "torchvision", "timm"),
    of_library("PyTorch Geometric, GCN", "graph, forward(data)", "pyg_gcn", "torch-geometric"),
    of_library("PyTorch Geometric, batches", "graphs, forward(batch)", "pyg_batches", "torch-geometric"),
    of_library("diffusers", "diffusion, U-Net", "diffusers_unet", "diffusers"),
    of_library("denoising-diffusion-pytorch", "diffusion, U-Net", "ddpm", "torchvision", "denoising-diffusion-pytorch"),
    of_library("denoising-diffusion-pytorch, 1D", "diffusion", "ddpm_1d", "torchvision", "denoising-diffusion-pytorch"),
    of_library("x-transformers, decoder", "GPT", "x_transformers_decoder", "x-transformers"),
    of_library("x-transformers, encoder and decoder", "Transformer", "x_transformers_encoder", "x-transformers"),
    of_library("vit-pytorch, ViT", "vision transformer", "vit", "torchvision", "vit-pytorch"),
    of_library("vit-pytorch, DeepViT", "vision transformer", "deepvit", "torchvision", "vit-pytorch"),
    of_library("Lightning", "autoencoder", "lightning_autoencoder", "lightning"),
    of_library("transformers, Trainer", "BERT", "transformers_trainer", "transformers", "accelerate"),
    of_library("transformers, a loop", "GPT-2", "transformers_loop", "transformers"),
    of_library("accelerate", "MLP", "accelerate_loop", "accelerate"),
    # Added later: programs of other repositories.
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
        "U-Net, autocast and a GradScaler",
        "milesial/Pytorch-UNet",
        "train.py",
        "--epochs 1 --batch-size 1 --scale 0.5",
        masks,
        packages=("torchvision", "tqdm"),
        offline=True,
    ),
    Program(
        "cleanrl dqn",
        "Q-learning",
        script="cleanrl/dqn.py",
        arguments="--total-timesteps 400 --learning-starts 100 --batch-size 32",
        **CLEANRL,
    ),
    Program(
        "cleanrl ppo",
        "actor and critic",
        script="cleanrl/ppo.py",
        arguments="--total-timesteps 1024 --num-envs 2",
        **CLEANRL,
    ),
    Program(
        "PyTorch-GAN gan",
        "GAN, BCE",
        "eriklindernoren/PyTorch-GAN",
        "implementations/gan/gan.py",
        GAN,
        mnist("../../data/mnist"),
        packages=VISION,
    ),
    Program(
        "PyTorch-GAN wgan_gp",
        "GAN, penalty on gradients",
        "eriklindernoren/PyTorch-GAN",
        "implementations/wgan_gp/wgan_gp.py",
        GAN,
        mnist("../../data/mnist"),
        packages=VISION,
    ),
    Program(
        "TCN adding_problem",
        "dilated convolutions, weight norm",
        "locuslab/TCN",
        "TCN/adding_problem/add_test.py",
        "--cuda --epochs 1 --seq_len 40 --levels 3",
    ),
    Program(
        "torchdiffeq ode_demo",
        "ODE solver",
        "rtqichen/torchdiffeq",
        "examples/ode_demo.py",
        "--niters 12 --data_size 100",
        packages=("torchdiffeq",),
    ),
    Program(
        "pytorch-tutorial bidirectional RNN",
        "LSTM",
        "yunjey/pytorch-tutorial",
        "tutorials/02-intermediate/bidirectional_recurrent_neural_network/main.py",
        prepare=mnist("../../data"),
        packages=VISION,
    ),
    Program(
        "pytorch-tutorial VAE",
        "VAE, BCE",
        "yunjey/pytorch-tutorial",
        "tutorials/03-advanced/variational_autoencoder/main.py",
        prepare=mnist("../../data"),
        packages=VISION,
    ),
    Program(
        "opacus mnist",
        "private SGD, gradients a sample",
        "pytorch/opacus",
        "examples/mnist.py",
        "--device cpu -n 1 -b 32 --data-root data",
        mnist("data"),
        packages=(*VISION, "opacus", "tqdm"),
    ),
    of_library("GPyTorch", "Gaussian process", "gpytorch_regression", "gpytorch"),
    of_library("pytorch-metric-learning", "triplets", "metric_learning", "pytorch-metric-learning"),
    # Added later: other kinds of training.
    Program(
        "cleanrl sac_continuous_action",
        "actor, two critics, averages of them",
        script="cleanrl/sac_continuous_action.py",
        arguments="--env-id Pendulum-v1 --total-timesteps 150 --learning-starts 100 --buffer-size 1000",
        **CLEANRL,
    ),
    Program(
        "crnn-pytorch",
        "CTC, LSTM behind convolutions",
        "GitYCC/crnn-pytorch",
        "src/train.py",
        prepare=words("data/mnt/ramdisk/max/90kDICT32px"),
        packages=("scipy", "pillow", "tqdm", "opencv-python-headless"),
        cwd=".",
    ),
    Program(
        "torchdiffeq odenet_mnist",
        "ODE solver, convolutions",
        "rtqichen/torchdiffeq",
        "examples/odenet_mnist.py",
        "--nepochs 1 --batch_size 8 --test_batch_size 64",
        mnist(".data/mnist"),
        packages=(*VISION, "torchdiffeq"),
    ),
    Program(
        "torchdiffeq latent_ode",
        "VAE, ODE solver",
        "rtqichen/torchdiffeq",
        "examples/latent_ode.py",
        "--niters 12",
        packages=("torchdiffeq", "matplotlib"),
    ),
    Program(
        "deepxde Burgers",
        "PINN, second derivatives",
        "lululxvi/deepxde",
        "examples/pinn_forward/Burgers.py",
        packages=("deepxde",),
    ),
    _of_trl("trl dpo", "DPO", "dpo", "--dataset_name pairs"),
    _of_trl("trl dpo, LoRA", "DPO of adapters", "dpo", "--dataset_name pairs --use_peft --lora_r 4", "peft"),
    _of_trl("trl sft, LoRA", "GPT-2 with adapters", "sft", "--dataset_name texts --use_peft --lora_r 4", "peft"),
    Program(
        "timm train.py --model-ema",
        "vision transformer, average of weights",
        "huggingface/pytorch-image-models",
        "train.py",
        "--data-dir data --model test_vit --num-classes 2 --device cpu --workers 1 -b 8 --epochs 1 --warmup-epochs 0 "
        "--opt adamw --model-ema --output out",
        classes("data/train", "data/validation", size=160),
        packages=(*VISION, "timm"),
        path=(".",),
    ),
    Program(
        "diffusers train_unconditional",
        "diffusion, U-Net, average of weights",
        "huggingface/diffusers",
        "examples/unconditional_image_generation/train_unconditional.py",
        "--train_data_dir data --resolution 32 --model_config_name_or_path small --train_batch_size 2 --num_epochs 1 "
        "--use_ema --output_dir out --cache_dir cache --save_images_epochs 9 --save_model_epochs 9",
        noise_model,
        packages=(*VISION, "diffusers", "datasets", "tensorboard", "httpx"),
        path=("src",),
    ),
    Program(
        "Moonlight toy_train --optimizer muon",
        "Qwen2, Muon in the script",
        "MoonshotAI/Moonlight",
        "examples/toy_train.py",
        "--optimizer muon --hidden_size 32",
        qwen,
        packages=("transformers", "datasets", "loguru"),
    ),
    Program(
        "powerful-gnns",
        "batches of graphs, sparse products",
        "weihua916/powerful-gnns",
        "main.py",
        "--epochs 1 --batch_size 8 --iters_per_epoch 12",
        small_graphs("dataset/MUTAG/MUTAG.txt"),
        packages=("networkx", "scikit-learn", "tqdm"),
    ),
    Program(
        "SupContrast",
        "contrastive loss, ResNet-18",
        "HobbitLong/SupContrast",
        "main_supcon.py",
        "--model resnet18 --dataset path --data_folder data --mean (0.5,0.5,0.5) --std (0.2,0.2,0.2) --batch_size 4 "
        "--epochs 1 --num_workers 0",
        classes("data", size=40),
        packages=(*VISION, "tensorboard-logger"),
    ),
]
