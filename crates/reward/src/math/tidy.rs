//! Normalizes mathematical text: one notation for signs, spaces and commands.

/// Commands that only change the layout, with their replacements.
#[rustfmt::skip]
const COMMANDS: [(&str, &str); 37] = [
    ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\cfrac", "\\frac"), ("\\left", ""),
    ("\\right", ""), ("\\displaystyle", ""), ("\\cdot", "*"), ("\\times", "*"), ("\\div", "/"),
    ("\\quad", " "), ("\\qquad", " "), ("\\big", ""),
    ("\\Big", ""), ("\\lbrace", "{"), ("\\rbrace", "}"), ("\\$", ""), ("\\%", "%"), ("\\{", "{"),
    ("\\(", ""), ("\\)", ""), ("\\[", ""), ("\\]", ""), ("\\le", "<="), ("\\leq", "<="), ("\\ge", ">="),
    ("\\geq", ">="), ("\\ne", "!="), ("\\neq", "!="), ("\\lt", "<"), ("\\gt", ">"),
    ("\\}", "}"), ("\\!", ""), ("\\,", ""), ("\\;", " "), ("\\:", " "), ("\\ ", " "), ("\\\\", " "),
];

/// Commands whose group contains words: the answer, or the unit of a value before them.
const WORDS: [&str; 6] = ["\\text", "\\mathrm", "\\textbf", "\\mathbf", "\\textit", "\\mbox"];

/// Signs of degrees after a number.
const DEGREES: [&str; 6] = ["^\\circ", "^{\\circ}", "^\\degree", "^{\\degree}", "\\degree", "°"];

/// Normalizes a text: drops currency signs, layout and a final full stop; writes `\text{ cm}` as words; writes `×`, `·`, `÷`, `−`, `²`, `½` and `**` as ASCII and `{,}` as a comma; trims white
/// space.
pub fn tidy(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.trim();
    while let Some(c) = rest.chars().next() {
        if c == '\\' {
            rest = command(rest, &mut out);
            continue;
        }
        let forms = DEGREES.into_iter().map(|degrees| (degrees, ' '));
        let mut forms = forms.chain([("{,}", ','), ("**", '^')]);
        if let Some((plain, after)) =
            forms.find_map(|(form, plain)| Some((plain, rest.strip_prefix(form)?)))
        {
            out.push(plain);
            rest = after;
            continue;
        }
        match c {
            '$' | '£' | '€' => {}
            '∞' => out.push_str("\\infty"),
            '×' | '·' | '⋅' | '∗' => out.push('*'),
            '÷' => out.push('/'),
            '−' | '–' => out.push('-'),
            '²' => out.push_str("^2"),
            '³' => out.push_str("^3"),
            '½' => out.push_str("\\frac{1}{2}"),
            '¼' => out.push_str("\\frac{1}{4}"),
            '¾' => out.push_str("\\frac{3}{4}"),
            '≤' => out.push_str("<="),
            '≥' => out.push_str(">="),
            '≠' => out.push_str("!="),
            '~' => out.push(' '),
            _ => out.push(c),
        }
        rest = &rest[c.len_utf8()..];
    }
    let out = out.trim();
    out.strip_suffix(['.', ',']).unwrap_or(out).trim().to_owned()
}

/// Writes the replacement of the command that `rest` begins with; returns the text after it.
fn command<'t>(rest: &'t str, out: &mut String) -> &'t str {
    let letters = rest[1..].bytes().take_while(u8::is_ascii_alphabetic).count();
    let next = rest[1..].chars().next().map_or(0, char::len_utf8);
    let (name, after) = rest.split_at(1 + letters.max(if letters == 0 { next } else { 0 }));
    if let Some((words, after)) = WORDS.contains(&name).then(|| group(after)).flatten() {
        match words.trim() {
            // A list of answers.
            "or" | "and" => out.push(','),
            // No number is a word and digits.
            words if after.starts_with(|c: char| c.is_ascii_digit()) => {
                out.push_str(&format!("\\text{{{words}}}"));
            }
            // Alone they are the answer, after a value its unit; elsewhere they make a text that is not read.
            words => {
                let separator = if out.ends_with(char::is_alphanumeric) || out.ends_with('}') {
                    " "
                } else {
                    ""
                };
                out.push_str(separator);
                out.extend(words.chars().filter(|c| *c != '°'));
            }
        }
        return after;
    }
    match COMMANDS.iter().find(|(known, _)| *known == name) {
        Some((_, plain)) => out.push_str(plain),
        None => out.push_str(name),
    }
    // `\pi r` keeps its letters apart.
    if letters > 0 && after.starts_with(|c: char| c.is_ascii_alphabetic()) {
        out.push(' ');
    }
    after
}

/// The content of a leading `{words}`, and the text after it.
fn group(text: &str) -> Option<(&str, &str)> {
    text.trim_start().strip_prefix('{')?.split_once('}')
}
