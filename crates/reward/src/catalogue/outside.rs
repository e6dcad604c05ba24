//! Metrics of texts, and functions that come from outside: programs, scripts, services, models.

use super::KindEntry;

const ANY: [f64; 2] = [f64::NEG_INFINITY, f64::INFINITY];

pub(super) const ENTRIES: [KindEntry; 6] = [
    KindEntry {
        kind: "text_similarity",
        formula: "how alike the extracted answer and metadata[reference] are by a metric: bleu \
                  (sacrebleu), gleu and meteor (nltk, without synonyms), rouge_1 to rouge_5 and \
                  rouge_l (rouge-score, F), cosine (of token counts), fuzzy_match (rapidfuzz \
                  ratio)",
        range: "0 to 1",
        parameters: "metric, reference = \"answer\", extract = \"(?s)<answer>(.*?)</answer>\"",
        typical_weight: "1.0",
        example: "metric = \"rouge_l\"",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "code",
        formula: "the share of the tests in metadata[tests] (lines of assertions) and \
                  metadata[cases] ([{input, output}]) that the last fenced block passes, run in a \
                  sandbox process; missing without tests",
        range: "0 to 1",
        parameters: "language = \"python\" (or \"rhai\"), tests = \"tests\", cases = \"cases\", \
                     timeout_ms = 5000, memory_mb = 256, max_output_bytes = 65536, partial = true",
        typical_weight: "2.0",
        example: "language = \"rhai\"",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "script",
        formula: "the value of a Rhai script that sees text, tokens, prompt, messages and metadata, \
                  held to max_operations; () is missing",
        range: "the script's",
        parameters: "source, max_operations = 100000",
        typical_weight: "0.5",
        example: "source = 'if contains(text, \"1\") { 1.0 } else { 0.0 }'",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "grader",
        formula: "an OpenAI grader (string_check, text_similarity, score_model, label_model, python, \
                  multi), its JSON as a text or a table; items are the metadata",
        range: "the grader's",
        parameters: "grader",
        typical_weight: "1.0",
        example: "grader = { type = \"text_similarity\", name = \"near\", evaluation_metric = \
                  \"fuzzy_match\", input = \"{{ sample.output_text }}\", reference = \"12\" }",
        bounds: [0.0, 1.0],
    },
    KindEntry {
        kind: "webhook",
        formula: "what a service answers to batches of {messages, completion, metadata}; missing \
                  while it does not answer",
        range: "the service's",
        parameters: "url, secret_env = \"\", max_batch = 32, max_concurrency = 4, timeout_ms = \
                     5000, retries = 2, backoff_ms = 200, max_backoff_ms = 10000, \
                     breaker_failures = 5, breaker_cooldown_ms = 10000, max_response_bytes = \
                     1048576, allow_http = false",
        typical_weight: "1.0",
        example: "url = \"http://127.0.0.1:9/score\"",
        bounds: ANY,
    },
    KindEntry {
        kind: "judge",
        formula: "what a language model thinks: its score on the scale min to max as 0 to 1, or \
                  within a group the share of pairs won, or the place in a ranking",
        range: "0 to 1",
        parameters: "base_url (or \"self\"), model = \"\", api_key_env = \"\", mode = \"score\" (or \
                     \"pairwise\", \"rank\"), rubric = \"helpfulness\" (or \"correctness\", \
                     \"safety\", \"custom\" with template), reference = \"answer\", min = 0, max = \
                     10, temperature = 0, max_tokens, seed = 0, max_pairs = 28, cache_entries, \
                     prompt_price = 0, completion_price = 0, and webhook's limits",
        typical_weight: "1.0",
        example: "base_url = \"http://127.0.0.1:9/v1\"\nmodel = \"judge\"",
        bounds: [0.0, 1.0],
    },
];
