# Every verb works from a fresh clone: the environment in .venv is made, and the extension built, when something is
# missing or older than its sources.
PYTHON ?= python3
# Which torch goes into .venv: make demo TORCH='torch>=2.6' takes the newest.
TORCH ?= torch==2.13.0
# A test has one thread, so this many run at a time: whole files, whose tests share processes and fixtures.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
PYTEST_FILES := $(PYTEST) -n $(WORKERS) --dist loadfile
# A CPU of today plays one without arithmetic for FP16 and BF16, and runs the tests of emulation.
WITH_AVX2_ALONE := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
OF_EMULATION := $(wildcard tests/casts/test_cpu_half*.py tests/casts/test_low_sums*.py) tests/frontend/test_levels.py
# C++ and CUDA, in all folders: read by clang-format; a change makes the extension out of date.
SOURCES := $(sort $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu'))
# Tests that come to other code without the extension: optimizers step by themselves, gradients of masters are FP32 at
# once, masters count versions and deny their memory otherwise. (Tests of kernels, casts and Apex's lists run with both anyway.)
OF_KERNELS := $(addprefix tests/,masters optimizers storage ways) \
	$(patsubst %,tests/apex_surface/test_%.py,amp_C amp_C_steps apex_fp16_optimizer apex_scalers) \
	$(patsubst %,tests/around/test_%.py,ddp_gradients fsdp_gradients sam several_optimizers shared_weights unowned) \
	$(patsubst %,tests/frontend/test_%.py,capabilities grad_scaler grad_scaler_as_torchs supported users) \
	$(patsubst %,tests/model/test_%.py,copies restored_models) \
	$(patsubst %,tests/training/test_%.py,apex_stash closures copied_trainings earlier_gradients edited_gradients loss_scaler \
		overflow readers_of_gradients scale_loss skip_nonfinite stash steps_in_bodies stories)
NVCC := $(or $(wildcard $(CUDA_HOME)/bin/nvcc),$(shell command -v nvcc 2>/dev/null))

.DEFAULT_GOAL := help
# The examples' models are tiny: a second thread would only wait for the first.
demo accuracy models: export OMP_NUM_THREADS ?= 1

.PHONY: help demo picture accuracy models healthy test test-more test-all stories mutations test-versions test-release test-arm lint format bench rivals sanitize cuda-compile gpu-check clean

help: ## list these verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/installed ## compare O0, O1, O2, O4 and O5 on a small GPT, three seeds each; ends with a table and a report in HTML
	$(BIN)/python -m amp_patch compare --levels O0,O1,O2,O4,O5 --seeds 3 --seed-flag=--seed --metric held_out_loss \
		--out out/demo examples/train.py -- --task wide_gpt --steps 60

# A CPU with BF16 arithmetic plays one without it: make picture PLAYS=avx512, or avx2.
PLAYED_avx512 := ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI
PLAYED_avx2 := $(WITH_AVX2_ALONE)
picture: $(VENV)/installed ## README's picture of this kind of machine: the demo, and its card; on a quiet one
	$(PLAYED_$(PLAYS)) $(MAKE) demo
	$(BIN)/python benchmarks/demo_picture.py

accuracy: $(VENV)/installed ## docs/accuracy.md and accuracy-formats.md again: three families of models, five seeds, O0 to O7; half an hour
	$(BIN)/python benchmarks/accuracy.py
	$(BIN)/python benchmarks/accuracy_formats.py

models: $(VENV)/models ## docs/models.md: public models of other packages at each level, those without a result yet; hours
	PYTHONPATH=$(VENV)/models_packages $(BIN)/python benchmarks/models.py $(if $(ONLY),--only $(ONLY))

healthy: $(VENV)/models ## the survey of 38 healthy models in three states each: no level may be told; half an hour
	PYTHONPATH=$(VENV)/models_packages $(BIN)/python benchmarks/healthy.py $(if $(ONLY),--only $(ONLY))

# The tests start hundreds of Pythons, each of which would compile amp_patch again where the shell says not to keep that.
test test-more test-all: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/installed ## every test that is not marked slow or program
	$(PYTEST_FILES) -m "not slow and not program"

test-more: $(VENV)/ecosystem ## whole programs; the tests of `test` without the extension, on AVX2 alone, beside other packages
	$(PYTEST_FILES) -m "program and not slow"
	AMP_PATCH_BACKEND=torch $(PYTEST_FILES) -m "not slow" $(OF_KERNELS)
	$(WITH_AVX2_ALONE) $(PYTEST_FILES) -m "not slow" $(OF_EMULATION)
	$(PYTEST_FILES) -m "not slow" tests/integrations tests/run/unedited/test_unedited_frameworks.py

test-all: test-more ## the other tests: `test-more`, and the tests marked slow
	$(PYTEST_FILES) -m "slow and not release"

stories: $(VENV)/installed ## more random lives of trainings, against training by hand; COUNT=2000 SEED=7
	$(BIN)/python tests/tell_stories.py --workers $(WORKERS) $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

mutations: $(VENV)/installed ## break the code in one place at a time: do the tests see it? ONLY="clip DDP"
	$(BIN)/python tests/mutations.py $(ONLY)

# PyPI's torch brings CUDA's libraries, some 5 GB for each: by hand, before a release.
test-versions: ## `test` on each torch and Python that we declare, or on ONLY="2.15.0@3.11 ..."; hours and gigabytes
	$(PYTHON) tests/versions.py --workers $(WORKERS) $(ONLY)

# Minutes each, for what rarely changes: by hand, before a release.
test-release: $(VENV)/installed ## README's lines in a bare environment, with the extension; kernels on all 2**32 patterns
	$(PYTEST_FILES) -m release

# On Linux on x86-64, with Debian's qemu-user-static and g++-aarch64-linux-gnu: no machine with such a processor is needed.
test-arm: $(VENV)/installed ## quick tests on an emulated ARM processor, those that tell most first; MINUTES=30 ONLY="tests/casts ..."
	nice -n 5 $(BIN)/python tests/arm.py $(if $(MINUTES),--minutes $(MINUTES)) $(ONLY)

lint: $(VENV)/installed ## ruff, mypy, the order of the imports and clang-format; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(if $(SOURCES),$(BIN)/clang-format --dry-run -Werror $(SOURCES))

format: $(VENV)/installed ## rewrite the sources as lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(SOURCES),$(BIN)/clang-format -i $(SOURCES))

# Torch's profiler, which counts the bytes an optimizer holds, says otherwise whenever it starts and stops.
bench: export KINETO_LOG_LEVEL ?= 99
bench: $(VENV)/installed ## time kernels, Python calls, optimizers, whole steps, gradient release, norms and FP16 on a CPU beside torch's; JSON in out/
	mkdir -p out
	for name in road kernels calls optimizer gradient_release step compile recording cpu_half norms; do $(BIN)/python benchmarks/$$name.py --json out/$$name.json || exit 1; done

RIVALS := .venv-rivals
rivals: export KINETO_LOG_LEVEL ?= 99
rivals: $(RIVALS)/installed ## AdamW beside that of torch, DeepSpeed, optimi, torchao, bitsandbytes and FlashOptim, on a CPU; JSON in out/
	mkdir -p out
	PYTHONPATH=. $(RIVALS)/bin/python benchmarks/rivals.py --json out/rivals.json

sanitize: $(VENV)/installed ## the C++ code's tests with AddressSanitizer and UBSan, built in out/sanitize
	PYTHON=$(BIN)/python sh tests/sanitize.sh

cuda-compile: $(VENV)/installed ## compile the CUDA sources with nvcc, print registers, spills and loads in flight; needs no GPU
	@test -n "$(NVCC)" || { echo "make cuda-compile: there is no nvcc, neither in CUDA_HOME nor on PATH" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet nvidia-cuda-nvdisasm || echo "no nvdisasm: loads in flight are not counted" >&2
	PYTHON=$(BIN)/python NVCC="$(NVCC)" sh tests/cuda/compile.sh

# With the machine's own Python: torch for CUDA comes with it, and nothing needs to be downloaded.
gpu-check: ## on a machine with a GPU: build, test, measure, capture; OUT=file or folder; in three parts: ONLY=build,look,first,offload,wide,new, ONLY=compare,tests,formats and ONLY=kernels,step,capture
	$(PYTHON) benchmarks/gpu_check.py $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT))

clean: ## remove files that were built here; .venv keeps its downloads
	rm -rf build out *.egg-info amp_patch/*.so amp_patch/_build.py $(VENV)/installed .pytest_cache .ruff_cache .mypy_cache
	find amp_patch benchmarks examples tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# torch first and alone: the build of the extension imports it.
$(VENV)/tools: Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet setuptools wheel ninja "$(TORCH)"
	touch $@

$(VENV)/installed: $(VENV)/tools setup.py pyproject.toml $(SOURCES)
	@echo "compiling the C++ extension: 3 to 5 minutes on two cores"
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[examples,dev]"
	touch $@

# Packages that amp_patch is tested with, 230 MB: only test-all wants it. amp_patch is there already, and not built
# again; TORCH keeps pip from taking another one. DeepSpeed is apart from the rest: accelerate would import it.
$(VENV)/ecosystem: $(VENV)/installed
	$(BIN)/python -m pip install --quiet "amp_patch[lightning,transformers,ecosystem]" "$(TORCH)"
	$(BIN)/python -m pip install --quiet einops hjson msgpack psutil py-cpuinfo "pydantic>=2"
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --target $(VENV)/deepspeed --upgrade deepspeed==0.18.2
	touch $@

# An environment of its own: some of the packages patch torch, or want other versions of what the tests use. The
# extension is the clone's, which is built for the same torch.
$(RIVALS)/installed: $(VENV)/installed
	$(PYTHON) -m venv $(RIVALS)
	$(RIVALS)/bin/python -m pip install --quiet setuptools wheel ninja numpy "$(TORCH)"
	$(RIVALS)/bin/python -m pip install --quiet torchao==0.18.0 torch-optimi==0.3.3 bitsandbytes==0.50.2 flashoptim==0.1.4 "$(TORCH)"
	$(RIVALS)/bin/python -m pip install --quiet einops hjson msgpack psutil py-cpuinfo "pydantic>=2" tqdm
	DS_BUILD_OPS=0 $(RIVALS)/bin/python -m pip install --quiet --no-build-isolation --no-deps deepspeed==0.18.2
	touch $@

# The models of docs/models.md. --no-deps: torchvision requires a torch that is not the CPU build.
$(VENV)/models: $(VENV)/ecosystem
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/models_packages --upgrade timm==1.0.31 diffusers==0.42.1 \
		torch-geometric==2.8.1 x-transformers==2.31.10 torchvision==0.28.0 einx==0.4.3 \
		torch-einops-utils==0.2.0 loguru==0.7.3 frozendict==2.5.1 pillow==13.0.0 pyparsing==3.3.3 xxhash==4.1.0 \
		importlib-metadata==10.2.0 zipp==4.1.2 requests==2.34.2 urllib3==2.8.0 certifi charset-normalizer==3.5.3
	touch $@
