# One entry point. `make demo` and `make test` do all the set-up on a machine with Go, Python 3 and a C compiler.
GO ?= go
BIN := bin

.PHONY: generate
generate: ## rewrite generated code (needs protoc from the Debian package protobuf-compiler)
	@command -v protoc >/dev/null || { echo 'protoc not found; install it with: apt-get install protobuf-compiler' >&2; exit 1; }
	GOBIN=$(CURDIR)/$(BIN)/tools $(GO) install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
	GOBIN=$(CURDIR)/$(BIN)/tools $(GO) install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
	find . -name '*.proto' -not -path './bin/*' | while read -r p; do \
	  PATH=$(CURDIR)/$(BIN)/tools:$$PATH protoc -I. --go_out=. --go_opt=paths=source_relative \
	    --go-grpc_out=. --go-grpc_opt=paths=source_relative "$$p" || exit 1; done
