//! Standard output and standard error of the binary.

use std::io::{self, Write};

/// Standard output, which remembers whether its reader has closed the pipe. The lock is taken for
/// each write only, because other threads may print too.
#[derive(Default)]
pub struct Output {
    closed: bool,
}

impl Output {
    /// Whether a write failed because the reader has closed the pipe.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    fn observe<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        self.closed |= matches!(&result, Err(e) if e.kind() == io::ErrorKind::BrokenPipe);
        result
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let result = io::stdout().write(bytes);
        self.observe(result)
    }

    fn flush(&mut self) -> io::Result<()> {
        let result = io::stdout().flush();
        self.observe(result)
    }
}

/// Prints an error and its causes to standard error, without a cause whose text an earlier one
/// already contains.
pub fn print_error(error: &anyhow::Error) {
    let append = |text: String, cause: String| {
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    };
    let text = error.chain().map(ToString::to_string).reduce(append).unwrap_or_default();
    // Without a standard error, the exit code still reports the failure.
    let _failed = writeln!(io::stderr(), "error: {text}");
}

/// Prints a remark about a result to standard error.
pub fn print_note(text: &str) {
    // The result contains the remark too.
    let _failed = writeln!(io::stderr(), "note: {text}");
}
