//! Feedback, and functions that compare with a reference.

use super::KindEntry;

pub(super) const ENTRIES: [KindEntry; 8] = [
    KindEntry {
        kind: "feedback",
        formula: "the value that clients post to /v1/feedback under the part's name",
        range: "any finite number; true is 1, false is 0",
        parameters: "type = \"number\" (or \"boolean\", \"comment\"), range = any, aggregate = \
                     \"last\" (or \"mean\", \"median\", \"majority\"), max_key_share = 1, \
                     share_rule = \"weight\" (or \"drop\")",
        typical_weight: "1.0",
        example: "",
        bounds: [f64::NEG_INFINITY, f64::INFINITY],
    },
    KindEntry {
        kind: "exact_match",
        formula: "1 if the extracted answer equals metadata[reference], white space at both ends \
                  trimmed, else 0; missing without a reference",
        range: "0 or 1",
        parameters: "ignore_case = false, reference = \"answer\", \
                     extract = \"(?s)<answer>(.*?)</answer>\"",
        typical_weight: "2.0",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "fuzzy_match",
        formula: "1 - (insertions and deletions from answer to reference) / (characters of both), \
                  0 where that is below threshold (rapidfuzz's ratio / 100); the first 4,096 \
                  characters count; missing without a reference",
        range: "0 to 1",
        parameters: "threshold = 0.0, ignore_case = false, reference = \"answer\", \
                     extract = \"(?s)<answer>(.*?)</answer>\"",
        typical_weight: "1.0",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "numeric_match",
        formula: "1 if |number in the extracted answer - number in metadata[reference]| <= \
                  max(tolerance, relative_tolerance x |reference|), else 0; missing without a \
                  numeric reference",
        range: "0 or 1",
        parameters: "tolerance = 1e-6, relative_tolerance = 0.0, reference = \"answer\", \
                     extract = \"(?s)<answer>(.*?)</answer>\"",
        typical_weight: "2.0",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "math_equal",
        formula: "1 if answer and metadata[reference] are the same value, else 0: numbers, \
                  fractions, percent, LaTeX (\\boxed, \\frac, \\sqrt, ...), + - * / ^, brackets, \
                  pi, tuples; exact for fractions, else within tolerance x max(1, |reference|); \
                  the answer is what extract finds, else the last \\boxed{}; missing without a \
                  reference",
        range: "0 or 1",
        parameters: "tolerance = 1e-6, reference = \"answer\", \
                     extract = \"(?s)<answer>(.*?)</answer>\"",
        typical_weight: "2.0",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "reasoning_accuracy",
        formula: "math_equal of what follows the reasoning's end, 0 where it never ends; missing \
                  without a reference",
        range: "0 or 1",
        parameters: "delimiters = [\"</think>\"], tolerance = 1e-6, reference = \"answer\", \
                     extract = \"(?s)<answer>(.*?)</answer>\"",
        typical_weight: "2.0",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "multiple_choice",
        formula: "1 if the chosen letter (\\boxed{B}, answer is B, \"B.\", (B)) is the one in \
                  metadata[reference], else 0; missing without such a letter there",
        range: "0 or 1",
        parameters: "choices = 10, reference = \"answer\", \
                     extract = \"(?s)<answer>(.*?)</answer>\"",
        typical_weight: "2.0",
        example: "",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "contains",
        formula: "1 if all (mode \"any\": one) of the phrases, or of metadata[reference] where \
                  none are listed, occur, else 0; missing without either",
        range: "0 or 1",
        parameters: "phrases = [], mode = \"all\", ignore_case = false, reference = \"answer\", \
                     extract = \"\"",
        typical_weight: "1.0",
        example: "",
        bounds: [0.0, 1.0],
    },
];
