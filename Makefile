# make chat    set up and chat; MODEL=qwen3:0.6b or file.gguf (else the last one, or the one that is built in),
#              BACKEND=CPU|CUDA|NV, ARGS="more options of orin-chat"
# make serve   set up and answer other programs; MODEL, BACKEND and ARGS as above
# make test    set up and run the tests; ARGS="options of pytest"
# make soak    faults and hostile input, 100,000 times, with a table of what was lost; ARGS="engine --share 0.1"
# make check   everything that continuous integration checks; check-thorough: with the tests that take minutes
# make lock    requirements.lock anew, with the newest versions that pyproject.toml allows (needs uv)
# make release a wheel of the last commit in dist/, tried in an empty environment, and a software bill of materials
# make clean   remove what these made
.PHONY: chat serve test soak check check-thorough lock release clean
BACKEND ?= auto
PYTHON = .venv/bin/python

# What `serve` needs comes at once: that takes a second, and seven later.
chat:
	@BACKEND=$(BACKEND) .ci/setup serve
	@$(PYTHON) -m app $(if $(MODEL),--model "$(MODEL)") --backend $(BACKEND) $(ARGS)

serve:
	@BACKEND=$(BACKEND) .ci/setup serve
	@$(PYTHON) -m app serve $(if $(MODEL),--model "$(MODEL)") --backend $(BACKEND) $(ARGS) || { code=$$?; [ $$code -eq 130 ] || exit $$code; } # Ctrl+C

# The tests run on the CPU backend.
test:
	@BACKEND=CPU .ci/setup dev
	@$(PYTHON) -m pytest $(ARGS)

soak:
	@BACKEND=CPU .ci/setup dev
	@$(PYTHON) -m tests.soak $(ARGS)

check:
	@.ci/run

check-thorough:
	@ORIN_THOROUGH=1 .ci/run

# For every platform and Python at once. setuptools builds the package itself.
lock:
	@echo "setuptools>=77" | uv pip compile pyproject.toml - --universal --python-version 3.11 \
		--extra cpu --extra gpu --extra mcp --extra serve --generate-hashes --no-emit-index-url --no-annotate --upgrade \
		--custom-compile-command "make lock" --quiet --output-file requirements.lock

release:
	@BACKEND=CPU .ci/setup dev
	@$(PYTHON) -m tools.release dist
	@.ci/try-wheel $(PYTHON)

clean:
	rm -rf .venv build dist *.egg-info
