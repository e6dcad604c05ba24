//! The `hone` binary.

fn main() -> std::process::ExitCode {
    hone::commands::main()
}
