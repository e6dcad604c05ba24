//! A Rhai engine that can only compute, within limits.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Instant;

use regex::{Regex, RegexBuilder};
use rhai::packages::{Package, StandardPackage};
use rhai::{Dynamic, Engine, EvalAltResult, FLOAT, INT, Position};

use crate::math::parse_number;

/// Compiled patterns kept per script; a script that uses more fails.
const PATTERNS: usize = 64;
/// Size limit of a compiled pattern in bytes.
const PATTERN_BYTES: usize = 1 << 18;
/// Bytes of text that the helpers may scan in one evaluation. Rhai does not count their work as
/// operations.
const SCAN_BUDGET: u64 = 64 << 20;
/// Operations between two checks of the deadline.
const CLOCK_INTERVAL: u64 = 512;

thread_local! {
    static DEADLINE: Cell<Option<Instant>> = const { Cell::new(None) };
    static SCAN_LEFT: Cell<u64> = const { Cell::new(SCAN_BUDGET) };
}

type Evaluated<T> = Result<T, Box<EvalAltResult>>;

/// An engine without modules, `eval`, printing or sleeping, and with limits on operations, recursion
/// and the size of every value.
pub(crate) fn restricted(operations: u64) -> Engine {
    let mut engine = Engine::new_raw();
    engine.register_global_module(StandardPackage::new().as_shared_module());
    engine.disable_symbol("eval");
    engine
        .set_max_operations(operations)
        .set_max_call_levels(32)
        .set_max_expr_depths(64, 32)
        .set_max_string_size(256 * 1024)
        .set_max_array_size(10_000)
        .set_max_map_size(10_000)
        .set_max_variables(1_000)
        .set_max_functions(200);
    engine.on_print(|_| {}).on_debug(|_, _, _| {});
    engine.on_progress(|operations| {
        let late =
            operations % CLOCK_INTERVAL == 0 && DEADLINE.get().is_some_and(|d| Instant::now() >= d);
        late.then(|| Dynamic::from("out of time"))
    });
    // Override the standard package's `sleep`, which would block the thread.
    engine.register_fn("sleep", |_: INT| {});
    engine.register_fn("sleep", |_: FLOAT| {});
    engine
}

/// Registers the helper functions of reward scripts.
pub(super) fn add_helpers(engine: &mut Engine) {
    engine.register_fn("contains", |text: &str, part: &str| scan(text).map(|t| t.contains(part)));
    engine.register_fn("count", |text: &str, part: &str| -> Evaluated<INT> {
        if part.is_empty() {
            return Ok(0);
        }
        Ok(INT::try_from(scan(text)?.matches(part).count()).unwrap_or(INT::MAX))
    });
    engine.register_fn("extract_tag", |text: &str, tag: &str| -> Evaluated<Dynamic> {
        Ok(between(scan(text)?, tag).map_or(Dynamic::UNIT, |inner| inner.to_owned().into()))
    });
    engine.register_fn("to_number", |text: &str| -> Evaluated<Dynamic> {
        Ok(parse_number(scan(text)?).map_or(Dynamic::UNIT, Dynamic::from_float))
    });
    // A missing tag has no number.
    engine.register_fn("to_number", |(): ()| Dynamic::UNIT);
    let compiled: Mutex<HashMap<String, Regex>> = Mutex::default();
    engine.register_fn("matches", move |text: &str, pattern: &str| -> Evaluated<bool> {
        let mut compiled = compiled.lock().map_err(|_| "matches: a pattern panicked")?;
        if let Some(regex) = compiled.get(pattern) {
            return Ok(regex.is_match(scan(text)?));
        }
        if compiled.len() >= PATTERNS {
            return Err(format!("matches: more than {PATTERNS} different patterns").into());
        }
        let mut builder = RegexBuilder::new(pattern);
        let regex = builder.size_limit(PATTERN_BYTES).dfa_size_limit(PATTERN_BYTES).build();
        let regex = regex.map_err(|error| {
            let text = error.to_string();
            format!("matches: `{pattern}`: {}", text.lines().last().unwrap_or_default())
        })?;
        let found = regex.is_match(scan(text)?);
        compiled.insert(pattern.to_owned(), regex);
        Ok(found)
    });
}

/// Charges the length of `text` to the scan budget.
fn scan(text: &str) -> Evaluated<&str> {
    let left = SCAN_LEFT.get().checked_sub(text.len() as u64);
    SCAN_LEFT.set(left.unwrap_or(0));
    match left {
        Some(_) => Ok(text),
        None => Err(EvalAltResult::ErrorTooManyOperations(Position::NONE).into()),
    }
}

/// The trimmed text between the last closed `<tag>` and its `</tag>`.
fn between<'t>(text: &'t str, tag: &str) -> Option<&'t str> {
    let (before, _) = text.rsplit_once(&format!("</{tag}>"))?;
    let (_, inner) = before.rsplit_once(&format!("<{tag}>"))?;
    Some(inner.trim())
}

/// Evaluates with a full scan budget; the engine stops `f` soon after `deadline`.
pub(crate) fn until<T>(deadline: Instant, f: impl FnOnce() -> T) -> T {
    DEADLINE.set(Some(deadline));
    let value = with_scan_budget(f);
    DEADLINE.set(None);
    value
}

/// Evaluates with a full scan budget.
pub(super) fn with_scan_budget<T>(f: impl FnOnce() -> T) -> T {
    SCAN_LEFT.set(SCAN_BUDGET);
    f()
}
