# The two commands of the README are `make demo` and `make test`; the rest are their parts.
.DEFAULT_GOAL := help
PY := .venv/bin/python
PLAY := .venv/bin/ansible-playbook
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help setup pins airgap outdated lab-up lab-down lab-status demo test test-all test-changed lint unit lab-test kernel docs docs-site bench bench-hosts bench-servers bench-allocation build bundle publish release

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 22

setup:  ## create the virtual environment and install missing system packages
	@.ci/setup

lab-up: setup  ## start a real Kubernetes cluster with simulated GPUs on this machine
	@$(PY) -m lab up

lab-down: setup  ## remove the lab and everything that it started
	@$(PY) -m lab down

lab-status: setup  ## show the state of the lab
	@$(PY) -m lab status

demo: lab-up  ## start the lab and run site.yml, acceptance.yml and inspect.yml
	@$(PLAY) playbooks/site.yml
	@$(PLAY) playbooks/acceptance.yml
	@$(PLAY) lab/demo.yml
	@$(PLAY) playbooks/inspect.yml
	@cat lab/next.txt

test: setup  ## run lint, unit tests, those on a real kernel, and the lab's; replaces a lab that is up, and removes it
	@$(PY) tests/run.py

test-all: setup  ## run every test: long ones, sanity, molecule and the upgrade of a cluster too (hours)
	@$(PY) tests/run.py --all

test-changed: setup  ## run the unit tests that the changes since main touch, by their imports
	@$(PY) tests/changed.py

lint unit kernel: setup  ## run one stage of the tests
	@$(PY) tests/run.py $@

lab-test: lab-up  ## run the lab's tests on a lab that is up and that nothing has touched, and keep it
	@$(PY) -m pytest tests/lab -v -p no:cacheprovider -m "not long"

docs: setup  ## regenerate docs/reference and the pictures
	@$(PY) docs/code_tables.py
	@$(PY) docs/layers.py
	@$(PY) docs/pictures.py

docs-site: setup  ## build the documentation as a site, in .cache/docs-site/html
	@$(PY) docs/site_builder.py

pins: setup  ## update the digests of keys, charts and images that are downloaded (ARGS=--dry-run shows them and writes nothing)
	@$(PY) .ci/pins.py $(ARGS)

airgap: setup  ## write meta/airgap.yml, the list of all that is fetched, from the pins, the roles and their catalogues
	@$(PY) .ci/airgap.py $(ARGS)

outdated: setup  ## list each pinned component whose registry has a newer release, and what it would take (writes nothing)
	@$(PY) .ci/outdated.py $(ARGS)

bench: setup  ## measure a run with nothing to do (the lab must be up, after make demo)
	@$(PY) bench/noop.py

bench-hosts: setup  ## measure how plan.yml grows up to 500 hosts, without machines (20 minutes)
	@$(PY) bench/hosts.py --hosts 25 100 500

bench-servers: setup  ## measure extender, device plugin and DRA driver under load (25 minutes, on an otherwise idle machine)
	@for each in device_plugin extender_filter extender_large scheduling dra; do $(PY) bench/$$each.py || exit 1; done

bench-allocation: setup  ## compare gpu_allocation_info with a plain list, on a real API server with 20,000 pods
	@$(PY) bench/allocation.py

build: setup  ## build the collection's tarball
	@.venv/bin/ansible-galaxy collection build --force

bundle: setup  ## write the operator's bundle for OLM in dist/operator (ARGS="--operator-image NAME@sha256:... --servers-image NAME@sha256:...")
	@$(PY) operator/schema.py --check
	@$(PY) operator/bundle.py $(ARGS)

publish: setup  ## put the operator's images, bundle and catalog into a registry (ARGS="--registry HOST/FOLDER")
	@$(PY) operator/schema.py --check
	@$(PY) operator/publish.py $(ARGS)

release: setup  ## make a release in dist/ (ARGS="--dry-run --without-images" tries it and changes nothing)
	@$(PY) .ci/release.py $(ARGS)
