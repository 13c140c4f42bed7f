//! Who may hold how many bytes of which pool: ledger, leases, growth transactions. No unsafe, no I/O, no CUDA.
