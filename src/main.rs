//! Hone's command line: parse, set telemetry up, run, exit code.

fn main() {}
