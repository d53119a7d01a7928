#!/usr/bin/env bash
# Starts two engines as a user would and runs the Python client's end-to-end tests against them.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$(mktemp -d)
pids=()
stop() {
	for p in "${pids[@]}"; do kill "$p" 2>/dev/null || true; done
	wait || true
	rm -rf "$dir"
}
trap stop EXIT
for side in prefill decode; do
	bin/engine run -c "configs/$side.yaml" --set "runtime_dir=$dir/run" --set "state_dir=$dir/state" 2>"$dir/$side.log" &
	pids+=($!)
done
for side in prefill decode; do
	for _ in $(seq 300); do
		bin/engine status --socket "$dir/run/$side-0/admin.sock" >/dev/null 2>&1 && break
		sleep 0.1
	done
	bin/engine status --socket "$dir/run/$side-0/admin.sock" >/dev/null || { cat "$dir/$side.log" >&2; exit 1; }
done
TERMINUS_TEST_SOCKET="$dir/run/prefill-0/worker.sock,$dir/run/decode-0/worker.sock" \
	python3 -W error::ResourceWarning -m unittest discover -s clients/python/tests -p test_engine.py
