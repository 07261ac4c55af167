# Every target sets up what it needs, once: a fresh clone and one command are enough.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PEERS := .venv-peers/bin
PEERS_STAMP := .venv-peers/.installed
PEER_PINS := -c constraints.txt -c benchmarks/constraints-peers.txt

.PHONY: help setup peers demo test test-full test-peers lint format evidence-engine evidence-books evidence-forecast evidence-simulation evidence-verify evidence-checkpoints evidence-tiers clean

help:
	@echo "make demo               train a small decoder on real text: two ranks, ZeRO-3, a plain loop beside it"
	@echo "make test               the test suite and the examples in the docstrings"
	@echo "make test-full          the full products that the suite samples"
	@echo "make lint               ruff and pyright"
	@echo "make peers              .venv-peers: the engines that shardbook is compared with (DeepSpeed, Lightning, transformers, accelerate)"
	@echo "make test-peers         the tests that need them"
	@echo "make evidence-engine    the figures that take too long for the suite, written to docs/evidence/"
	@echo "make evidence-books     the same of books and measurement; with DeepSpeed's where make peers was run"
	@echo "make evidence-forecast  the same of forecasts, beside measured steps, published measurements and other estimators"
	@echo "make evidence-simulation  both witnesses beside measured steps, FSDP2 and DDP too, and what a simulation costs; writes docs/accuracy.md"
	@echo "make evidence-verify    200 right configurations, faults put in for real, DeepSpeed (after make peers), and what a record costs"
	@echo "make evidence-checkpoints  pairs of shapes, 50 kills, 1,000 corruptions, memory, and throughput beside plain reading and writing"
	@echo "make evidence-tiers     recomputation and offload: bits, books, a disk's speed, a budget, kills, advice; DeepSpeed's after make peers"

setup: $(STAMP)

# torch comes first and exactly pinned: whatever asks for torch afterwards finds it there and fetches no other build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train,hf,report,explore,dev]' -c constraints.txt
	touch $(STAMP)

# DeepSpeed comes as source and looks for torch while it is built: so it is built beside the torch that is there, and compiles nothing.
peers: $(PEERS_STAMP)

$(PEERS_STAMP): pyproject.toml constraints.txt benchmarks/constraints-peers.txt
	test -x $(PEERS)/python || $(PYTHON) -m venv .venv-peers
	$(PEERS)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" setuptools wheel $(PEER_PINS)
	$(PEERS)/python -m pip install --quiet --disable-pip-version-check -e '.[train]' pytest hypothesis $(PEER_PINS)
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PEERS)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		deepspeed lightning transformers accelerate $(PEER_PINS)
	$(MAKE) --no-print-directory .venv-peers/libaio || echo "no libaio: DeepSpeed's offload to a disk will not be compared"
	touch $(PEERS_STAMP)

# What DeepSpeed's offload to a disk is compiled with, from Debian, into a folder: nothing is installed.
.venv-peers/libaio:
	mkdir -p $@.new
	cd $@.new && apt-get download libaio-dev libaio1 && for package in *.deb; do dpkg-deb -x $$package . || exit 1; done
	mv $@.new $@

test-peers: $(PEERS_STAMP)
	$(PEERS)/python -m pytest tests -m peers

demo: $(STAMP)
	$(BIN)/shardbook train --ranks 2 --stage 3 --steps 60 --check-baseline 5

test: $(STAMP)
	$(BIN)/python -m pytest

test-full: $(STAMP)
	$(BIN)/python -m pytest -m full

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

evidence-engine: $(STAMP)
	$(BIN)/python -m benchmarks.evidence_engine

evidence-books: $(STAMP)
	$(BIN)/python -m benchmarks.evidence_books

evidence-forecast: $(STAMP)
	$(BIN)/python -m benchmarks.evidence_forecast

evidence-simulation: $(STAMP)
	$(BIN)/python -m benchmarks.evidence_simulation

evidence-verify: $(STAMP)
	$(BIN)/python -m benchmarks.evidence_verify

evidence-checkpoints: $(STAMP)
	$(BIN)/python -m benchmarks.evidence_checkpoints

evidence-tiers: $(STAMP)
	$(BIN)/python -m benchmarks.evidence_tiers

clean:
	rm -rf .venv .venv-peers .pytest_cache .ruff_cache .hypothesis build dist
