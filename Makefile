# One entry point. `make demo` and `make test` do all the set-up on a fresh machine with Go, Python 3
# and a C compiler.
GO     ?= go
PYTHON ?= python3
BIN    := bin
TOOLS  := $(CURDIR)/$(BIN)/tools
VENV   := $(BIN)/venv
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -X main.version=$(VERSION)

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
PROTOC_GEN_GO := google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
PROTOC_GEN_GO_GRPC := google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2

.PHONY: help
help: ## show the targets
	@awk -F': .*## ' '/^[a-z-]+: .*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## put the binaries into bin/
	$(GO) build -ldflags '$(LDFLAGS)' -o $(BIN)/ ./cmd/engine ./plugins/tcp/engine-plugin-tcp

.PHONY: examples
examples: build venv ## put the example backends into bin/: engine-plugin-copy, repage.wasm, rawguest.wasm
	$(GO) build -o $(BIN)/engine-plugin-copy ./plugins/sdk/example/copy
	GOOS=wasip1 GOARCH=wasm $(GO) build -ldflags '-s -w' -buildmode=c-shared -o $(BIN)/repage.wasm ./plugins/sdk/example/repage
	$(VENV)/bin/python -m ziglang cc -target wasm32-freestanding -O2 -nostdlib -fno-builtin -Wl,--no-entry \
	  -o $(BIN)/rawguest.wasm plugins/sdk/example/rawguest/rawguest.c

# An etcd for the demo, from a module of its own.
.PHONY: etcdtest
etcdtest:
	$(GO) build -C internal/membership/etcdtest -ldflags '-s -w' -o $(CURDIR)/$(BIN)/etcdtest .

.PHONY: demo
demo: build $(if $(filter etcd,$(PEERS)),etcdtest) ## move real KV cache between two engines on this machine and verify every page; PEERS=etcd: with a store
	$(BIN)/engine demo $(if $(PEERS),--peers $(PEERS)) $(DEMO)

.PHONY: test
test: build vet staticcheck venv ## vet, static check, all tests under the race detector, the Python packages
	GORACE=atexit_sleep_ms=0 $(GO) test -race -timeout 15m -skip '^(TestConformance|TestMutants|TestSound|TestThreads|TestDescriptors)$$' $$($(GO) list ./... | grep -v -e /core/explore -e /internal/sim -e '/internal/sweep$$')
	$(GO) test -timeout 15m ./core/explore ./internal/sim # no goroutines and millions of states: not under the race detector
	$(GO) test -timeout 15m -run '^(TestConformance|TestMutants|TestSound|TestThreads|TestDescriptors)$$' ./plugins/... # thousands of conversations, and the memory of plugins is judged: likewise
	$(GO) test -timeout 15m ./internal/sweep # kills processes and measures how long rooms take to end: alone
	$(PYTHON) -W error::ResourceWarning -m unittest discover -s clients/python/tests
	scripts/e2e.sh

.PHONY: vet
vet:
	@out=$$(gofmt -l .); [ -z "$$out" ] || { echo "not gofmt-ed: $$out" >&2; exit 1; }
	$(GO) vet ./...
	$(GO) vet -C internal/membership/etcdtest ./...

.PHONY: staticcheck
staticcheck: $(TOOLS)/staticcheck
	$(TOOLS)/staticcheck ./...

$(TOOLS)/staticcheck:
	GOBIN=$(TOOLS) $(GO) install $(STATICCHECK)

.PHONY: venv
venv: $(VENV)/ready ## what the tests need of Python, into bin/venv
$(VENV)/ready: plugins/sdk/python/requirements-dev.txt
	@$(PYTHON) -m venv $(VENV) || { echo '$(PYTHON) -m venv does not work here; on Debian install it with: apt-get install python3-venv' >&2; exit 1; }
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@echo '$(CURDIR)/plugins/sdk/python' > "$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/terminus.pth"
	@touch $@

.PHONY: nixl
nixl: $(BIN)/nixl/ready $(BIN)/nixl-1.4.1/ready ## put the nixl backend into bin/, and the releases of NIXL that its tests drive into bin/nixl*
	CGO_ENABLED=0 $(GO) build -ldflags '$(LDFLAGS)' -o $(BIN)/ ./plugins/nixl/engine-plugin-nixl
# Alone: what the wheels name as dependencies (torch, numpy) is for their Python half.
$(BIN)/nixl/ready: NIXL := 1.5.1
$(BIN)/nixl-1.4.1/ready: NIXL := 1.4.1
$(BIN)/nixl/ready $(BIN)/nixl-1.4.1/ready:
	@$(PYTHON) -m venv $(@D) || { echo '$(PYTHON) -m venv does not work here; on Debian install it with: apt-get install python3-venv' >&2; exit 1; }
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nixl-cu12==$(NIXL)
	@touch $@

.PHONY: explore
explore: ## walk more interleavings of two engines than `make test` does (an hour or two, up to 16 GB)
	$(GO) test -timeout 4h ./core/explore -run TestExploreLong -long -v

.PHONY: sim
sim: build ## run SCHEDULES (default 10000000, an hour or two) simulated clusters under faults, into docs/reliability and RELIABILITY.md
	$(BIN)/engine sim run --schedules $(or $(SCHEDULES),10000000) --seed $(or $(SEED),1) -o json > $(BIN)/sim.json
	mv $(BIN)/sim.json docs/reliability/sim.json # a run that failed leaves the last result
	$(GO) test ./internal/reliability -update

.PHONY: sweep
sweep: build ## kill, stop and freeze the processes of a cluster at every syscall, and make every fault of the network (an hour), into docs/reliability and RELIABILITY.md
	$(GO) test -timeout 4h ./internal/sweep -run TestSweep -v -modes kill,stop,freeze -pairs $(or $(PAIRS),0) -within 0 -seed $(or $(SEED),1) \
	  -version '$(VERSION)' -out $(CURDIR)/$(BIN)/sweep.json
	mv $(BIN)/sweep.json docs/reliability/sweep.json # a run that failed leaves the last result
	$(GO) test ./internal/netfault -run TestFaults -count 1 -timeout 3h -long -runs $(or $(RUNS),20) -version '$(VERSION)' -again 'make sweep$(if $(RUNS), RUNS=$(RUNS))' -out $(CURDIR)/$(BIN)/netfaults.json
	mv $(BIN)/netfaults.json docs/reliability/netfaults.json
	$(GO) test ./internal/reliability -update

.PHONY: tools-strace
tools-strace: ## install strace, which the kill sweep needs (Debian, as root)
	command -v strace >/dev/null || { apt-get update && apt-get install -y --no-install-recommends strace; }

.PHONY: fuzz
fuzz: ## run every fuzzer for FUZZTIME (default 30s), into docs/reliability and RELIABILITY.md
	@mkdir -p $(BIN)
	$(GO) run ./internal/reliability/fuzzrun -time $(or $(FUZZTIME),30s) -version '$(VERSION)' > $(BIN)/fuzz.json
	mv $(BIN)/fuzz.json docs/reliability/fuzz.json
	$(GO) test ./internal/reliability -update

.PHONY: generate
generate: ## rewrite generated code (needs protoc, Debian package protobuf-compiler)
	@command -v protoc >/dev/null || { echo 'protoc not found; install it with: apt-get install protobuf-compiler' >&2; exit 1; }
	GOBIN=$(TOOLS) $(GO) install $(PROTOC_GEN_GO)
	GOBIN=$(TOOLS) $(GO) install $(PROTOC_GEN_GO_GRPC)
	git ls-files '*.proto' | while read -r p; do \
	  PATH=$(TOOLS):$$PATH protoc -I. --go_out=. --go_opt=paths=source_relative \
	    --go-grpc_out=. --go-grpc_opt=paths=source_relative "$$p" || exit 1; done
	protoc -Iterminus_plugin=plugins/sdk/contract --python_out=plugins/sdk/python terminus_plugin/contract.proto
	$(GO) generate ./...

.PHONY: clean
clean: ## remove bin/
	rm -rf $(BIN)
