use std::path::Path;
use std::sync::{Arc, OnceLock};

use proptest::prelude::*;

use super::*;

fn codec() -> &'static Arc<Codec> {
    static CODEC: OnceLock<Arc<Codec>> = OnceLock::new();
    CODEC.get_or_init(|| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/qwen2-tiny");
        Arc::new(Codec::load(&ModelDir::open(&dir).unwrap()).unwrap())
    })
}

/// All pieces of a stream, and whether it stopped.
fn stream(ids: &[TokenId], stop: &[String]) -> (Vec<TextPiece>, bool) {
    let mut stream = TextStream::new(Arc::clone(codec()), stop);
    let mut pieces: Vec<TextPiece> = ids.iter().map(|id| stream.push(*id)).collect();
    pieces.push(stream.finish());
    let stopped = pieces.iter().any(|piece| piece.stopped);
    (pieces, stopped)
}

fn joined(pieces: &[TextPiece]) -> String {
    pieces.iter().map(|piece| piece.text.as_str()).collect()
}

/// One token per byte, so that characters are split at every position.
fn byte_tokens(bytes: &[u8]) -> Vec<TokenId> {
    let of = |byte: u8| {
        (0..codec().vocab() as TokenId).find(|id| codec().token_bytes(*id) == [byte]).unwrap()
    };
    bytes.iter().map(|byte| of(*byte)).collect()
}

#[test]
fn every_byte_has_a_token() {
    let all: Vec<u8> = (0..=255).collect();
    assert_eq!(byte_tokens(&all).len(), 256);
}

#[test]
fn renders_the_prompt_without_additions() {
    let messages = [Message::new(Role::User, "Hi <|im_end|>")];
    let ids = codec().prompt(&messages).unwrap();
    let text = "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(ids, codec().encode(text).unwrap());
    assert_eq!(codec().decode(&ids).unwrap(), "user\nHi \nassistant\n");
    let bytes: Vec<u8> = ids.iter().flat_map(|id| codec().token_bytes(*id)).collect();
    assert_eq!(bytes, text.as_bytes());
    assert_eq!(codec().stop_ids(), [2, 0]);
    assert_eq!(codec().template_hash().len(), 16);
    assert!(codec().token_bytes(1_000_000).is_empty());
}

#[test]
fn an_answer_ends_with_the_stop_token_of_the_template() {
    let end = codec().encode("<|im_end|>").unwrap();
    assert_eq!(codec().turn_end().as_slice(), end);
    let ids = codec().answer("four").unwrap().unwrap();
    assert_eq!(ids, [codec().encode("four").unwrap(), end].concat());
    assert_eq!(codec().answer("four<|im_end|>").unwrap(), None);
    assert_eq!(codec().answer("<|im_start|>user").unwrap(), None);
}

#[test]
fn only_possible_stop_strings_are_held_back() {
    let stop = ["</answer>".to_owned(), "STOP".to_owned()];
    let mut stream = TextStream::new(Arc::clone(codec()), &stop);
    let mut push = |text: &str| -> String {
        codec().encode(text).unwrap().into_iter().map(|id| stream.push(id).text).collect()
    };
    assert_eq!(push("four <"), "four ");
    assert_eq!(push("/"), "");
    assert_eq!(push("a1"), "</a1");
    assert_eq!(push("x</answer> and more"), "x");
    assert_eq!(push("more"), "");
    assert_eq!(stream.finish(), TextPiece { text: String::new(), stopped: true });
}

#[test]
fn an_incomplete_character_waits_and_becomes_a_replacement_character_at_the_end() {
    let bytes = "a漢".as_bytes();
    let ids = byte_tokens(&bytes[..3]);
    let (pieces, _) = stream(&ids, &[]);
    let texts: Vec<&str> = pieces.iter().map(|piece| piece.text.as_str()).collect();
    assert_eq!(texts, ["a", "", "", "\u{FFFD}"]);
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[ab<]{0,12}", any::<String>(), "(?:[a-c]|é|漢|👩‍🚀|ﬁ){0,16}",]
}

proptest! {
    #[test]
    fn concatenated_pieces_equal_the_decoded_ids(ids in prop::collection::vec(0_u32..300, 0..60)) {
        let (pieces, stopped) = stream(&ids, &[]);
        prop_assert!(!stopped);
        prop_assert_eq!(joined(&pieces), codec().decode(&ids).unwrap());
    }

    #[test]
    fn concatenated_pieces_equal_the_lossy_text_of_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        let (pieces, _) = stream(&byte_tokens(&bytes), &[]);
        prop_assert_eq!(joined(&pieces), String::from_utf8_lossy(&bytes).into_owned());
    }

    #[test]
    fn text_is_the_same_for_any_split_into_tokens(text in text(), cuts in prop::collection::vec(any::<bool>(), 64)) {
        // A mixture of single bytes and of merged tokens.
        let mut ids = Vec::new();
        for (at, character) in text.char_indices() {
            let whole = &text[at..at + character.len_utf8()];
            if cuts[at % cuts.len()] {
                ids.extend(byte_tokens(whole.as_bytes()));
            } else {
                ids.extend(codec().encode(whole).unwrap());
            }
        }
        let (pieces, _) = stream(&ids, &[]);
        prop_assert_eq!(joined(&pieces), codec().decode(&ids).unwrap());
    }

    #[test]
    fn no_text_at_or_after_a_stop_string_is_returned(
        before in text(), stop in prop::collection::vec(text(), 1..4), after in text(),
    ) {
        let whole = format!("{before}{}{after}", stop[0]);
        let ids = byte_tokens(whole.as_bytes());
        let (pieces, stopped) = stream(&ids, &stop);
        let text = joined(&pieces);
        let stops: Vec<&String> = stop.iter().filter(|stop| !stop.is_empty()).collect();
        prop_assert_eq!(stopped, stops.iter().any(|stop| whole.contains(*stop)));
        prop_assert!(stops.iter().all(|stop| !text.contains(*stop)));
        if stopped {
            // The returned text is followed by the stop string that is complete first.
            let rest = whole.strip_prefix(&text).unwrap();
            let hits = stops.iter().filter(|stop| rest.starts_with(**stop));
            let hit = hits.min_by_key(|stop| stop.len()).unwrap();
            let upto = &whole[..text.len() + hit.len() - hit.chars().last().unwrap().len_utf8()];
            prop_assert!(stops.iter().all(|stop| !upto.contains(*stop)));
        } else {
            prop_assert_eq!(text, whole);
        }
    }
}
