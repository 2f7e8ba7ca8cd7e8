#!/bin/sh
# The collection of both priors on one GPU: sh benchmarks/sweeps/collect.sh 540, as often as it takes.
#   $1    seconds; what is finished then stays in the stores, and the next call goes on
#   OUT   folder of the stores, simulated.db and stored.db
# Trials that store in twelve processes, then simulated ones in captured graphs, which others would starve. README.md says what becomes of them.
set -u
seconds=${1:?how many seconds}
end=$(($(date +%s) + seconds))
export OMP_NUM_THREADS=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
simulated() { python benchmarks/collect.py --store "$OUT/simulated.db" --seconds $((end - $(date +%s))) --engine graphs --workers 2 "$@"; }
stored() { python benchmarks/collect.py --store "$OUT/stored.db" --seconds $((end - $(date +%s))) --engine inline --workers 12 "$@"; }
choose() { python benchmarks/make_sweeps.py choose --store "$OUT/$1.db" && python benchmarks/make_sweeps.py sweeps; }

stored rates_stored && choose stored && stored stored stored_again stored_fits
simulated rates_simulated && choose simulated && simulated simulated simulated_again superclasses_uniform superclasses_cheap_first simulated_fits
for kind in simulated stored; do
    python -c "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('pragma wal_checkpoint(truncate)')" "$OUT/$kind.db"
done
