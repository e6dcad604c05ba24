//! Functions of a completion's form, length and style, and what is made of others.

use super::KindEntry;

pub(super) const ENTRIES: [KindEntry; 20] = [
    KindEntry {
        kind: "regex",
        formula: "min(1, matches / count): with count 1 whether the pattern matches anywhere; \
                  with full whether it matches all of it, white space at both ends apart",
        range: "0 to 1",
        parameters: "pattern, full = false, count = 1",
        typical_weight: "0.5",
        example: "pattern = '\\d+'",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "format_strict",
        formula: "1 if the completion is <reasoning>...</reasoning><answer>...</answer> and \
                  nothing else but white space, each tag exactly once, else 0",
        range: "0 or 1",
        parameters: "tags = [\"reasoning\", \"answer\"]",
        typical_weight: "0.5 to 1.0",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "format_soft",
        formula: "1 if the opening and closing tags occur in order, whatever stands around and \
                  between them, else 0",
        range: "0 or 1",
        parameters: "tags = [\"reasoning\", \"answer\"]",
        typical_weight: "0.5",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "format_incremental",
        formula: "max(0, (share of the opening and closing tags that stand exactly once) - \
                  trailing_penalty x (characters after the last closing tag))",
        range: "0 to 1",
        parameters: "tags = [\"reasoning\", \"answer\"], trailing_penalty = 0.001",
        typical_weight: "0.5 to 1.0",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "think_format",
        formula: "1 if the completion begins with <think>, has no second one, and has </think> \
                  behind it, else 0 (as TRL)",
        range: "0 or 1",
        parameters: "none",
        typical_weight: "0.5 to 1.0",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "think_answer",
        formula: "1 if the completion is <think>...</think><answer>...</answer>, each tag exactly \
                  once and the answer not blank, else 0",
        range: "0 or 1",
        parameters: "none",
        typical_weight: "0.5 to 1.0",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "json_valid",
        formula: "1 if the completion (or, with fenced, its first fenced block) is one JSON \
                  value, else 0",
        range: "0 or 1",
        parameters: "fenced = false",
        typical_weight: "0.5 to 1.0",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "json_schema",
        formula: "1 if the completion (or, with fenced, its first fenced block) is JSON that the \
                  schema allows, else 0; missing where schema_from names no sound schema",
        range: "0 or 1",
        parameters: "schema (a table, or JSON in a text) or schema_from (a metadata key), \
                     fenced = false",
        typical_weight: "0.5 to 1.0",
        example: "schema = { type = \"object\", required = [\"answer\"] }",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "integer_answer",
        formula: "1 if the extracted answer is a whole number, else 0",
        range: "0 or 1",
        parameters: "extract = \"(?s)<answer>(.*?)</answer>\"",
        typical_weight: "0.5",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "length",
        formula: "max(0, 1 - |completion tokens - ideal| / spread), the stop token counted",
        range: "0 to 1",
        parameters: "ideal, spread",
        typical_weight: "0.1 to 0.5",
        example: "ideal = 20\nspread = 20",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "length_range",
        formula: "1 from min to max tokens; outside max(0, 1 - distance / fade), with fade 0 at \
                  once 0",
        range: "0 to 1",
        parameters: "min = 0, max, fade = 0",
        typical_weight: "0.1 to 0.5",
        example: "min = 4\nmax = 20\nfade = 10",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "cosine_scaled",
        formula: "low + (high - low) (1 + cos(pi min(1, tokens / max_tokens))) / 2, where low, \
                  high are min_correct, max_correct for an answer that math_equal accepts and \
                  max_wrong, min_wrong for others; missing without a reference",
        range: "min_wrong to max_correct",
        parameters: "max_tokens, min_correct = 0.5, max_correct = 1.0, min_wrong = -1.0, \
                     max_wrong = -0.5, tolerance = 1e-6, reference = \"answer\", \
                     extract = \"(?s)<answer>(.*?)</answer>\"",
        typical_weight: "1.0 to 2.0",
        example: "max_tokens = 100",
        bounds: [-1.0, 1.0],
    },
    KindEntry {
        kind: "soft_overlong",
        formula: "0 up to max_tokens - cache tokens, then (max_tokens - cache - tokens) / cache, \
                  -1 beyond max_tokens (DAPO)",
        range: "-1 to 0",
        parameters: "max_tokens, cache",
        typical_weight: "0.5 to 1.0",
        example: "max_tokens = 20\ncache = 10",
        bounds: [-1.0, 0.0],
    },
    KindEntry {
        kind: "reasoning_steps",
        formula: "min(1, markers / target): \"Step 1:\", \"First,\", ..., and lines that begin \
                  with \"1.\", \"1)\", \"- \" or \"* \"",
        range: "0 to 1",
        parameters: "target = 3",
        typical_weight: "0.1 to 0.5",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "citations",
        formula: "min(1, different citations / target): [1], (Smith, 2020), addresses",
        range: "0 to 1",
        parameters: "target = 3",
        typical_weight: "0.1 to 0.5",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "repetition_penalty",
        formula: "(1 - different n-grams / all n-grams) x max_penalty, of words in lower case or \
                  of tokens",
        range: "max_penalty to 0",
        parameters: "ngram = 3, max_penalty = -1.0, unit = \"words\"",
        typical_weight: "0.2 to 1.0",
        example: "",
        bounds: [-1.0, 0.0],
    },
    KindEntry {
        kind: "forbidden_phrases",
        formula: "max(floor, -penalty x occurrences of the phrases as whole words)",
        range: "floor to 0",
        parameters: "phrases, penalty = 0.5, floor = -1.0, ignore_case = true",
        typical_weight: "0.2 to 1.0",
        example: "phrases = [\"as an AI\", \"sorry\"]",
        bounds: [-1.0, 0.0],
    },
    KindEntry {
        kind: "language",
        formula: "1 if the first 1,000 characters are in the language (ISO 639-3 code), at that \
                  confidence or more, else 0; missing without letters",
        range: "0 or 1",
        parameters: "language, confidence = 0.0",
        typical_weight: "0.2 to 0.5",
        example: "language = \"eng\"",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "keywords",
        formula: "share of the keywords, or of the list in metadata[reference] where none are \
                  given, that occur as whole words, letter case ignored; missing without either",
        range: "0 to 1",
        parameters: "keywords = [], reference = \"keywords\"",
        typical_weight: "0.5 to 1.0",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "ensemble",
        formula: "the mean, min, median or max (how) of the values of other kinds, those missing \
                  left out; missing where all are",
        range: "that of the members",
        parameters: "how = \"mean\", of = a list of tables with kind, its parameters, and clip, \
                     scale, offset where wanted",
        typical_weight: "that of the members",
        example: "of = [{ kind = \"think_format\" }, \
                  { kind = \"length\", ideal = 10, spread = 10, scale = 0.5 }]",
        bounds: [0.0, 1.0],
    },
];
