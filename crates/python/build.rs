//! Tells the module which profile of cargo compiles it, for `headrace.build_info()`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for (name, of_cargo) in [("BUILD_PROFILE", "PROFILE"), ("BUILD_OPT_LEVEL", "OPT_LEVEL")] {
        // Cargo always sets both for build scripts.
        println!("cargo:rustc-env={name}={}", std::env::var(of_cargo).unwrap_or_else(|_| "unknown".into()));
    }
}
