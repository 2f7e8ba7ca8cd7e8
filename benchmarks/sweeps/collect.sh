#!/bin/sh
# The collection of both priors on one GPU, in calls of at most ten minutes: sh benchmarks/sweeps/collect.sh 1, then 2, then 3.
#   IN    folder with what the last call left in OUT (peers unless given)
#   OUT   folder for the store (priors.db) and the sweeps with their rates (sweeps.tar)
# A call may be cut off and repeated; what is finished is in the store. docs/priors.md says what becomes of it.
set -u
call=${1:?which call: 1, 2 or 3}
in=${IN:-peers}
export OMP_NUM_THREADS=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
for part in priors.db priors.db-wal; do [ -f "$in/$part" ] && [ ! -f "$OUT/$part" ] && cp "$in/$part" "$OUT/$part"; done
[ -f "$in/sweeps.tar" ] && tar -xf "$in/sweeps.tar" -C benchmarks/sweeps
simulated="simulated simulated_again superclasses_uniform superclasses_cheap_first"
run() { seconds=$1; shift; timeout $((seconds + 30)) python benchmarks/collect.py --store "$OUT/priors.db" --seconds "$seconds" "$@"; }
keep() { tar -cf "$OUT/sweeps.tar" -C benchmarks/sweeps $(cd benchmarks/sweeps && ls *.toml rates.json); }

case $call in
1)  # rates at full precision, then as much of the simulated prior as fits
    run 150 --engine graphs rates_simulated
    run 110 --engine inline --workers 15 rates_stored
    python benchmarks/make_sweeps.py choose --store "$OUT/priors.db" && python benchmarks/make_sweeps.py sweeps && keep
    run 200 --engine graphs $simulated ;;
2)  run 540 --engine graphs $simulated ; keep ;;
3)  run 540 --engine inline --workers 15 stored stored_again ; keep ;;
esac
python -c "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('pragma wal_checkpoint(truncate)')" "$OUT/priors.db"
