# Each target sets itself up on a machine with nothing but Python >= 3.11; a second run reuses the environment.
#
#   make quickstart                                  train a drafter for the pocket target, and decode with it
#   make test                                        the whole suite, newest transformers
#   make test-compat                                 the `compat` subset, oldest supported transformers
#   make style | make style-fix                      ruff
#
#   make test PYTHON=python3.12 PYTEST_ARGS='tests/drafter -k mask'
#   make test TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'    (a smaller download)

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
VENV_COMPAT ?= .venv-5.17
VENV_STYLE ?= .venv-style
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2

OLDEST_TRANSFORMERS = transformers==5.17.0 huggingface_hub<2
SPECULATORS = speculators==0.9.0

# Said in full, so that `accelerate launch` has nothing to guess and prints no warning about it.
ACCELERATE_LAUNCH = accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no

.PHONY: quickstart test test-compat style style-fix clean

quickstart: $(VENV)/.quickstart
	$(VENV)/bin/$(ACCELERATE_LAUNCH) recipes/quickstart.py $(QUICKSTART_ARGS)

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

test-compat: $(VENV_COMPAT)/.test
	$(VENV_COMPAT)/bin/python -m pytest -n $(PYTEST_WORKERS) -m "compat and not slow and not gpu" $(PYTEST_ARGS)

style: $(VENV_STYLE)/.ruff
	$(VENV_STYLE)/bin/ruff format --check .
	$(VENV_STYLE)/bin/ruff check .

style-fix: $(VENV_STYLE)/.ruff
	$(VENV_STYLE)/bin/ruff check --fix .
	$(VENV_STYLE)/bin/ruff format .

clean:
	rm -rf $(VENV) $(VENV_COMPAT) $(VENV_STYLE)

# The stamps: a file in an environment says that this step of its set-up is complete.

%/.created:
	@$(PYTHON) -c 'import sys; sys.exit("hf_dflash needs Python >= 3.11, and $(PYTHON) is %d.%d: set PYTHON=..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --upgrade pip
	touch $@

# First and alone, so that nothing that follows chooses another build.
%/.torch: %/.created
	$*/bin/python -m pip install $(TORCH)
	touch $@

$(VENV)/.quickstart: $(VENV)/.torch pyproject.toml
	$(VENV)/bin/python -m pip install --quiet -e '.[data,eval]'
	touch $@

# speculators' metadata refuses transformers releases on which the part that the parity tests use runs: --no-deps.
$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(VENV)/bin/python -m pip install --quiet -e '.[test]'
	$(VENV)/bin/python -m pip install --quiet --no-deps '$(SPECULATORS)'
	touch $@

$(VENV_COMPAT)/.test: $(VENV_COMPAT)/.torch pyproject.toml
	$(VENV_COMPAT)/bin/python -m pip install --quiet $(foreach requirement,$(OLDEST_TRANSFORMERS),'$(requirement)') -e '.[test]'
	$(VENV_COMPAT)/bin/python -m pip install --quiet --no-deps '$(SPECULATORS)'
	touch $@

# The version in pyproject.toml is the only one.
$(VENV_STYLE)/.ruff: $(VENV_STYLE)/.created pyproject.toml
	$(VENV_STYLE)/bin/python -m pip install --quiet "$$(grep -o 'ruff==[0-9.]*' pyproject.toml)"
	touch $@

.SECONDARY:
