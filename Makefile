# make serve   set up on first use, then serve the model tiny on Ray with one prefill and one decode worker
# make test    set up on first use, then run every test
# make check   lint, formatting, types and layers
# make format  format every file
# make api     write docs/api.md from the docstrings
# make bench   the benchmarks that need no model of yours, and tests of them that take long
#
# Longer suites; make test runs a part of each:
# make parity  every combination of the tests that compare tokens across topologies
# make faults  aborts in every state; kills and stalls of real processes; broken and slow links; a
#              planner that adds and removes a worker
# make sim     3,500 simulated clusters with faults, in virtual time; every alert in its fault; rehearsals and planners
# make soak    half an hour of mixed load on a cluster on Ray, a fault every ten seconds
# make kernels every GPU kernel compiled at every shape in every dtype, on the pinned Triton and on 3.6.0, the one of
#              torch 2.11. make test compiles some shapes in bf16, and on 3.6.0 one shape of them
# make frameworks  LangChain, instructor, pydantic-ai, LiteLLM and openai against tiny, in a virtual environment that is
#              installed once (half a gigabyte). make test runs the openai client there if it is installed
# make published  a published checkpoint, SmolLM2-135M-Instruct, against transformers and between topologies; it is
#              downloaded once (100 MB)
# make fuzz    a million damaged frames, a million damaged records, 100,000 interleavings of hand-offs, 1,300
#              workloads of a scheduler
#
# make clean   delete the virtual environment and all caches
# make help    print this
#
# SERVE_OPTIONS='--decode 2'   options of baton serve for make serve
# TEST_PROCESSES=4             pytest processes of make test, plus one for interpreted kernels: many tests wait
# SOAK_MINUTES=30 SOAK_SEED=1  length and seed of make soak

PYTHON ?= $(firstword $(foreach name,python3.11 python3 python,$(shell command -v $(name))))
VENV ?= .venv
BIN := $(VENV)/bin
HAS_NVIDIA := $(shell { command -v nvidia-smi || ls -d /proc/driver/nvidia; } 2>/dev/null)
# With an NVIDIA driver, the machine's torch is used, because it fits the driver. Without one, a CPU build is pinned.
CONSTRAINTS := constraints/$(if $(HAS_NVIDIA),gpu,cpu).txt
VENV_FLAGS := $(if $(HAS_NVIDIA),--system-site-packages)
TEST_PROCESSES ?= 4
SOAK_MINUTES ?= 30
SOAK_SEED ?= 1
# A second Triton in a folder of its own; PYTHONPATH puts it before the one of the virtual environment.
TRITON_36 ?= $(VENV)/triton-3.6.0
KERNELS := $(BIN)/python -m pytest --numprocesses 2 tests/kernels/test_aot.py
KERNELS_36 := PYTHONPATH=$(abspath $(TRITON_36)) $(KERNELS)
STAMP := $(VENV)/.installed-from-$(notdir $(CONSTRAINTS))

# The tests start hundreds of processes. Without cached bytecode each would compile Baton anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: all help setup redis serve test bench parity faults sim soak fuzz published frameworks kernels check format api clean

all: check test

help:
	@sed -n '/^#/!q; s/^# \?//p' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)

$(STAMP): pyproject.toml $(wildcard constraints/*.txt)
	@echo "setting up $(VENV) once; this takes a few minutes"
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[worker,ray,dev]'
	touch $@

redis:
	@command -v redis-server >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server; \
	fi >/dev/null 2>&1; \
	command -v redis-server >/dev/null || echo "note: redis-server is not installed; tests that need it are skipped"

serve: setup
	@exec $(BIN)/baton serve tiny $(SERVE_OPTIONS)

# One torch thread in each process: more would compete for cores with the other tests. Interpreted kernels need a
# process of their own, which runs meanwhile; its output follows.
test: export OMP_NUM_THREADS = 1
test: setup redis
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -p no:cacheprovider tests/kernels/interpreted \
		>$(VENV)/interpreted.log 2>&1 & pid=$$!; trap "kill $$pid 2>/dev/null" INT TERM; \
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
		--ignore=tests/kernels/interpreted; others=$$?; \
	wait $$pid; interpreted=$$?; cat $(VENV)/interpreted.log; exit $$((others | interpreted))
	@$(MAKE) --no-print-directory -o setup $(TRITON_36)/.installed || \
		echo "note: Triton 3.6.0 cannot be installed; its part of the tests is skipped"
	@! test -e $(TRITON_36)/.installed || $(KERNELS_36) \
		-k "not test_kernel_compiles or 128-bfloat16 or sample-select-both or sample-draw-both"

$(TRITON_36)/.installed:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRITON_36) triton==3.6.0
	PYTHONPATH=$(abspath $(TRITON_36)) $(BIN)/python -c "import triton; assert triton.__version__ == '3.6.0'"
	touch $@

kernels: setup $(TRITON_36)/.installed
	$(KERNELS) -m "slow or not slow"
	$(KERNELS_36) -m "slow or not slow"

bench: setup
	$(BIN)/baton bench scheduler
	$(BIN)/baton bench prefix_index
	$(BIN)/baton bench router_faults
	$(BIN)/baton bench batching
	$(BIN)/baton bench kv
	$(BIN)/python -m baton.bench.gpu
	$(BIN)/python -m pytest tests/unit/bench -m slow

parity: setup
	$(BIN)/python -m pytest tests/parity tests/e2e/test_recall.py tests/unit/engine/speculation -m "slow or not slow"
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/interpreted -m "slow or not slow"

faults: setup redis
	$(BIN)/python -m pytest tests/faults tests/e2e/test_planner.py tests/e2e/test_serve_nodes.py -m "slow or not slow"
	$(BIN)/baton bench black_holes

sim: setup
	$(BIN)/python -m pytest tests/faults/test_sim.py tests/unit/sim tests/unit/planner tests/unit/cluster/test_alerts.py \
		tests/unit/router/index -m "slow or not slow"

soak: setup redis
	$(BIN)/baton bench soak --minutes $(SOAK_MINUTES) --seed $(SOAK_SEED)

fuzz: setup
	$(BIN)/python -m pytest tests/unit/kvtransfer tests/unit/baton tests/e2e/test_http_fuzz.py \
		tests/unit/engine/scheduler/test_workloads.py -k "damaged or interleavings or workloads" -m "slow or not slow"

published: setup
	$(BIN)/python -m pytest tests/parity/test_published.py -m slow -rsP

frameworks: setup
	$(BIN)/python -m pytest tests/e2e/test_frameworks.py -m "slow or not slow" -rs

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

format: setup
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

api: setup
	$(BIN)/python -m tests.api_page > docs/api.md.new
	mv docs/api.md.new docs/api.md

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
