//! Text to token ids and back: tokenizer, chat template and stop tokens.

mod continuation;

use std::borrow::Cow;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, LazyLock};

use regex::{Captures, Regex};
use serde_json::{Map, Value, json};
use tokenizers::{
    DecoderWrapper, Model as _, NormalizedString, OffsetType, PreTokenizer as _, Token, Tokenizer,
};
use toktrie::TokTrie;

use hone_core::types::{ChatOptions, GrammarSpec, Message, Role, TokenId, Tool, ToolCall};
use hone_model::ModelDir;

use crate::error::EngineError;
use crate::grammar::{CompiledGrammar, GrammarError, GrammarQueue, GrammarVocabulary};
use crate::template::{ChatTemplate, ThinkTags};
use crate::tools::ToolFormat;

pub use continuation::{ContinuedPrompt, EncodedAgain};

/// A rendered conversation, whose stand-ins hide the special tokens in the texts of its messages.
struct RenderedChat<'c> {
    text: String,
    stand_ins: Option<StandIns<'c>>,
}

/// Tokenizer, chat template and stop tokens of one model.
pub struct Codec {
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    stop_ids: Vec<TokenId>,
    /// How tokens spell bytes.
    alphabet: Alphabet,
    /// Special tokens, which add no text.
    special: HashSet<TokenId>,
    /// Finds the tokens that only markup may contain: special tokens and stop tokens.
    markup: Option<Regex>,
    /// The text of all tokens, concatenated. The tokenizer needs two map look-ups and a copy.
    token_text: Vec<u8>,
    /// The text of token `id` is `token_text[bounds[id]..bounds[id + 1]]`.
    bounds: Vec<usize>,
    /// Compiles grammars for these tokens.
    grammars: Arc<GrammarQueue>,
}

impl Codec {
    /// Reads the tokenizer and the template of a model directory.
    ///
    /// # Errors
    /// [`EngineError::Model`] if one of them cannot be read or parsed, or the tokenizer is neither byte-level nor of
    /// SentencePiece's kind.
    pub fn load(dir: &ModelDir) -> Result<Self, EngineError> {
        let path = dir.tokenizer_file();
        let fail = |error| EngineError::component(path.display(), error);
        let mut tokenizer = Tokenizer::from_bytes(dir.tokenizer_json()?).map_err(fail)?;
        // Tokenizers that were saved after training may truncate or pad. A prompt must stay whole.
        tokenizer.with_truncation(None).map_err(fail)?;
        tokenizer.with_padding(None);
        let alphabet = Alphabet::of(tokenizer.get_decoder()).ok_or_else(|| {
            EngineError::Model(format!(
                "{}: the decoder's type must be \"ByteLevel\", or a \"Sequence\" of \"Replace\" (of \
                 \u{2581}), \"ByteFallback\", \"Fuse\" and perhaps \"Strip\"",
                path.display()
            ))
        })?;
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, t)| t.special).map(|(id, _)| *id).collect();
        let reserved = added.iter().filter(|(id, t)| t.special || dir.stop_ids.contains(id));
        let markup = token_finder(reserved.map(|(_, token)| token.content.clone()))?;
        let mut codec = Self {
            tokenizer: Arc::new(tokenizer),
            template: ChatTemplate::new(&dir.chat_template, &dir.special_tokens)?,
            stop_ids: dir.stop_ids.clone(),
            alphabet,
            special,
            markup,
            token_text: Vec::new(),
            bounds: Vec::new(),
            grammars: Arc::default(),
        };
        let (mut text, mut bounds) = (Vec::new(), vec![0]);
        for id in 0..codec.vocab() {
            text.extend_from_slice(&codec.text_bytes(id as TokenId));
            bounds.push(text.len());
        }
        (codec.token_text, codec.bounds) = (text, bounds);
        Ok(codec)
    }

    /// The ids of a conversation, with the generation prompt. No special token is added beyond
    /// those of the template, and those in the texts of messages are ordinary text.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if the template refuses the conversation.
    pub fn prompt(&self, messages: &[Message]) -> Result<Vec<TokenId>, EngineError> {
        self.chat(messages, &ChatOptions::default(), self.tool_format(), true)
    }

    /// [`Self::prompt`] with functions and variables of the template, and with or without the generation prompt.
    /// `format` is how the model writes calls, see [`ChatTemplate::render_with`].
    pub fn chat(
        &self,
        messages: &[Message],
        options: &ChatOptions,
        format: ToolFormat,
        generate: bool,
    ) -> Result<Vec<TokenId>, EngineError> {
        let RenderedChat { text, stand_ins } =
            self.rendered(messages, options, format, generate)?;
        self.encode_rendered(&text, stand_ins.as_ref())
    }

    fn rendered(
        &self,
        messages: &[Message],
        options: &ChatOptions,
        format: ToolFormat,
        generate: bool,
    ) -> Result<RenderedChat<'_>, EngineError> {
        let texts = texts_of(messages, options);
        let stand_ins = match &self.markup {
            Some(finder) => StandIns::choose(finder, texts.iter().map(String::as_str))?,
            None => None,
        };
        let text = match &stand_ins {
            None => self.template.render_with(messages, options, format, generate)?,
            Some(stand_ins) => {
                let hide = |text: &str| stand_ins.hide(text).into_owned();
                let (messages, options) = with_texts(messages, options, &hide);
                self.template.render_with(&messages, &options, format, generate)?
            }
        };
        Ok(RenderedChat { text, stand_ins })
    }

    /// The ids of a rendered conversation, or of a part of it.
    fn encode_rendered(
        &self,
        text: &str,
        stand_ins: Option<&StandIns<'_>>,
    ) -> Result<Vec<TokenId>, EngineError> {
        let Some(stand_ins) = stand_ins else { return self.encode(text) };
        // The steps are those of the library.
        let encode = || {
            let added = self.tokenizer.get_added_vocabulary();
            let mut pieces = added.extract_and_normalize(self.tokenizer.get_normalizer(), text);
            pieces.normalize(|piece| stand_ins.reveal(piece))?;
            if let Some(splitter) = self.tokenizer.get_pre_tokenizer() {
                splitter.pre_tokenize(&mut pieces)?;
            }
            pieces.tokenize(|piece| self.spell(piece.get()))?;
            pieces.into_encoding(None, 0, OffsetType::None)
        };
        let encoding = encode().map_err(|error| EngineError::component("tokenizer", error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Whether a prompt ends with the opening think tag, so that the answer begins inside the reasoning.
    pub fn opens_reasoning(&self, prompt: &[TokenId]) -> bool {
        let Some(tags) = self.think_tags() else { return false };
        // More tokens than the tag and white space after it have bytes.
        let end = prompt.get(prompt.len().saturating_sub(16)..).unwrap_or_default();
        self.decode_all(end).trim_end().ends_with(tags.open)
    }

    /// The tokens of a piece of text. If a merge would make a special token, each character is encoded
    /// alone.
    fn spell(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        let model = self.tokenizer.get_model();
        let tokens = model.tokenize(text)?;
        if !tokens.iter().any(|token| self.is_markup(token.id)) {
            return Ok(tokens);
        }
        let mut spelled = Vec::new();
        for character in text.chars() {
            spelled.extend(model.tokenize(character.encode_utf8(&mut [0; 4]))?);
        }
        Ok(spelled)
    }

    /// Whether only markup may contain a token: special tokens and stop tokens.
    fn is_markup(&self, id: TokenId) -> bool {
        self.special.contains(&id) || self.stop_ids.contains(&id)
    }

    /// The ids of a text. Special tokens in it are recognized; none are added.
    ///
    /// # Errors
    /// [`EngineError::Model`] if the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, EngineError> {
        self.encode_text(text, false)
    }

    /// [`Self::encode`], where `framed` adds the special tokens that the tokenizer puts around a text,
    /// such as one for its beginning.
    pub fn encode_text(&self, text: &str, framed: bool) -> Result<Vec<TokenId>, EngineError> {
        let encoding = self.tokenizer.encode_fast(text, framed);
        encoding
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| EngineError::component("tokenizer", error))
    }

    /// The ids of a text as a whole answer: its tokens, then [`Self::turn_end`]. `None` if the text
    /// contains a special token, which no answer contains before its end.
    ///
    /// # Errors
    /// [`EngineError::Model`] if the tokenizer fails.
    pub fn answer(&self, text: &str) -> Result<Option<Vec<TokenId>>, EngineError> {
        let mut ids = self.encode(text)?;
        if ids.iter().any(|id| self.is_markup(*id)) {
            return Ok(None);
        }
        ids.extend(self.turn_end());
        Ok(Some(ids))
    }

    /// The token that ends an answer: the stop token that the template writes after one, or the first
    /// stop token if it writes none.
    pub fn turn_end(&self) -> Option<TokenId> {
        let message = |role, content: &str| Message::new(role, content);
        let question = message(Role::User, "a");
        let asked = self.template.render(std::slice::from_ref(&question)).ok();
        let answered = self.template.render(&[question, message(Role::Assistant, "b")]).ok();
        let rest = asked.zip(answered).and_then(|(asked, answered)| {
            let (_, rest) = answered.strip_prefix(&asked)?.split_once('b')?;
            self.encode(rest).ok()
        });
        let written = rest.into_iter().flatten().find(|id| self.stop_ids.contains(id));
        written.or_else(|| self.stop_ids.first().copied())
    }

    /// The text of ids, without special tokens. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`EngineError::Model`] if the tokenizer fails.
    pub fn decode(&self, ids: &[TokenId]) -> Result<String, EngineError> {
        if self.alphabet == Alphabet::Bytes {
            let text = self.tokenizer.decode(ids, true);
            return text.map_err(|error| EngineError::component("tokenizer", error));
        }
        // The library replaces every byte of an invalid sequence, not the sequence as a whole.
        let bytes: Vec<u8> = ids.iter().flat_map(|id| self.text_bytes(*id).into_owned()).collect();
        let text = String::from_utf8_lossy(&bytes);
        Ok(self.alphabet.without_prefix(&text).to_owned())
    }

    /// The text of ids, special tokens included. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode_all(&self, ids: &[TokenId]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| self.token_bytes(*id)).collect();
        let text = String::from_utf8_lossy(&bytes);
        self.alphabet.without_prefix(&text).to_owned()
    }

    /// The token as the vocabulary spells it; `None` for ids that the tokenizer does not know.
    pub fn token(&self, id: TokenId) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    /// Whether decoding removes a space before a text whose first token is this.
    pub fn removes_space(&self, first: TokenId) -> bool {
        let text = self.text_bytes(first);
        text.first() == Some(&b' ') && self.alphabet.without_prefix(" ").is_empty()
    }

    /// The bytes of one token, for the `bytes` of OpenAI's logprobs. Empty for ids that the
    /// tokenizer does not know (padding rows of the embedding).
    pub fn token_bytes(&self, id: TokenId) -> Vec<u8> {
        self.tokenizer.id_to_token(id).map_or_else(Vec::new, |token| self.alphabet.bytes(token))
    }

    /// The bytes that a token adds to the text; none for a special token.
    fn text_bytes(&self, id: TokenId) -> Cow<'_, [u8]> {
        let at = id as usize;
        match self.bounds.get(at..at + 2) {
            Some(&[start, end]) => Cow::Borrowed(&self.token_text[start..end]),
            _ if self.special.contains(&id) => Cow::Borrowed(&[]),
            _ => Cow::Owned(self.token_bytes(id)),
        }
    }

    /// The special token with this text, if there is one. It adds no text to an answer.
    pub fn special_id(&self, text: &str) -> Option<TokenId> {
        self.tokenizer.token_to_id(text).filter(|id| self.special.contains(id))
    }

    /// The format of calls that the chat template shows.
    pub fn tool_format(&self) -> ToolFormat {
        self.template.tool_format()
    }

    /// The texts around reasoning, if the chat template mentions them.
    pub fn think_tags(&self) -> Option<ThinkTags> {
        self.template.think_tags()
    }

    /// Compiles a grammar for the tokens of this model, outside the calling thread, unless it was one of
    /// the last.
    ///
    /// # Errors
    /// [`GrammarError`] if the grammar is malformed, too large or not supported.
    pub async fn compile_grammar(
        self: &Arc<Self>,
        spec: &GrammarSpec,
    ) -> Result<Arc<CompiledGrammar>, GrammarError> {
        let codec = Arc::clone(self);
        self.grammars.compile(spec, move || codec.vocabulary()).await
    }

    /// The tokens, for grammars.
    pub(crate) fn vocabulary(&self) -> Result<GrammarVocabulary, GrammarError> {
        let size = self.special.iter().chain(&self.stop_ids).map(|id| *id as usize + 1);
        let ids = 0..size.fold(self.vocab(), usize::max) as TokenId;
        let word = |id: TokenId| match self.is_markup(id) {
            // No text contains this byte.
            true => {
                let name = self.token(id).unwrap_or_default();
                [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat()
            }
            false => self.text_bytes(id).into_owned(),
        };
        let words: Vec<Vec<u8>> = ids.clone().map(word).collect();
        // Decoding removes a space that begins the text.
        let not_first = ids.filter(|id| self.removes_space(*id)).collect();
        let tokenizer = (self.alphabet == Alphabet::Bytes).then(|| Arc::clone(&self.tokenizer));
        GrammarVocabulary::new(&words, &self.stop_ids, not_first, tokenizer)
    }

    /// Tokens that end a completion.
    pub fn stop_ids(&self) -> &[TokenId] {
        &self.stop_ids
    }

    /// First 16 hexadecimal digits of the SHA-256 of the chat template.
    pub fn template_hash(&self) -> &str {
        self.template.hash()
    }

    /// Number of ids that the tokenizer knows, from 0.
    pub fn vocab(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }
}

// How the tokens of a tokenizer spell the bytes of texts.

/// SentencePiece's sign for a space.
const SPACE: char = '\u{2581}';

/// How tokens spell bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Alphabet {
    /// A character for each byte, as in GPT-2.
    Bytes,
    /// SentencePiece's: plain text with [`SPACE`] for spaces, and `<0x0A>` for single bytes.
    Pieces {
        /// Whether texts are encoded with a space before them, which decoding removes.
        prefixed: bool,
    },
}

/// The byte for each character of a byte-level token, by code point. In GPT-2's alphabet printable Latin-1
/// characters represent their own byte, the characters from U+0100 on represent the other bytes in order.
static BYTE_OF_CHAR: LazyLock<[Option<u8>; 512]> = LazyLock::new(|| {
    let mut table = [None; 512];
    let mut next = 256;
    for byte in 0..=u8::MAX {
        if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
            table[usize::from(byte)] = Some(byte);
        } else {
            table[next] = Some(byte);
            next += 1;
        }
    }
    table
});

impl Alphabet {
    /// The alphabet whose tokens a decoder joins, if it is known.
    pub fn of(decoder: Option<&DecoderWrapper>) -> Option<Self> {
        let decoder = match decoder? {
            DecoderWrapper::ByteLevel(_) => return Some(Self::Bytes),
            DecoderWrapper::Sequence(sequence) => serde_json::to_value(sequence).ok()?,
            _ => return None,
        };
        let steps = decoder.get("decoders")?.as_array()?;
        let pieces = [
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
            json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}),
        ];
        let prefixed = *steps == pieces;
        (prefixed || *steps == pieces[..3]).then_some(Self::Pieces { prefixed })
    }

    /// The bytes of a token.
    pub fn bytes(self, token: String) -> Vec<u8> {
        match self {
            Self::Bytes => {
                let byte = |c: char| BYTE_OF_CHAR.get(c as usize).copied().flatten();
                // An added token may have characters outside the byte alphabet. It is literal text then.
                let bytes: Option<Vec<u8>> = token.chars().map(byte).collect();
                bytes.unwrap_or_else(|| token.into_bytes())
            }
            Self::Pieces { .. } => match single_byte(&token) {
                Some(byte) => vec![byte],
                None => token.replace(SPACE, " ").into_bytes(),
            },
        }
    }

    /// A text that starts with its first token, without the space that encoding put before it.
    pub fn without_prefix(self, text: &str) -> &str {
        match self {
            Self::Pieces { prefixed: true } => text.strip_prefix(' ').unwrap_or(text),
            _ => text,
        }
    }
}

/// The byte of a token like `<0x0A>`.
fn single_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

// Special tokens in the texts of clients, where they are ordinary text.
//
// A chat template joins markup and the texts of messages to one string, in which the tokenizer recognizes
// special tokens. A client could so begin another turn by writing `<|im_start|>system`. Therefore a
// stand-in replaces every special token in a client's text before the template is applied: one
// character of Unicode's private use planes that no text contains, which a template treats like any
// other. When the special tokens of the markup have been recognized, the text of its token replaces
// each stand-in again, and is encoded like any text.
//
// Other added tokens, such as Qwen's `<think>`, are recognized in texts, too.

/// The expression that finds `tokens` in a text: of those that begin first, the longest. `None` without
/// tokens.
fn token_finder(tokens: impl Iterator<Item = String>) -> Result<Option<Regex>, EngineError> {
    let mut tokens: Vec<String> = tokens.filter(|token| !token.is_empty()).collect();
    if tokens.is_empty() {
        return Ok(None);
    }
    // The first alternative that matches is taken.
    tokens.sort_by_key(|token| Reverse(token.len()));
    let any: Vec<String> = tokens.iter().map(|token| regex::escape(token)).collect();
    let regex = Regex::new(&any.join("|"));
    regex.map(Some).map_err(|error| EngineError::component("special tokens", error))
}

/// The stand-ins of the special tokens in the texts of one conversation.
struct StandIns<'f> {
    finder: &'f Regex,
    /// By the text of the token.
    characters: BTreeMap<String, char>,
}

impl<'f> StandIns<'f> {
    /// Chooses a stand-in for every token of `finder` that occurs in `texts`; `None` if there is none.
    pub fn choose<'t>(
        finder: &'f Regex,
        texts: impl Iterator<Item = &'t str> + Clone,
    ) -> Result<Option<Self>, EngineError> {
        let found = texts.clone().flat_map(|text| finder.find_iter(text)).map(|hit| hit.as_str());
        let found: BTreeSet<&str> = found.collect();
        if found.is_empty() {
            return Ok(None);
        }
        let mut free = ('\u{F0000}'..='\u{FFFFD}').chain('\u{100000}'..='\u{10FFFD}');
        let used: HashSet<char> =
            texts.flat_map(str::chars).filter(|c| *c >= '\u{F0000}').collect();
        let mut characters = BTreeMap::new();
        for token in found {
            let Some(character) = free.find(|c| !used.contains(c)) else {
                let reason = "the messages contain special tokens and every private use character";
                return Err(EngineError::Invalid(reason.to_owned()));
            };
            characters.insert(token.to_owned(), character);
        }
        Ok(Some(Self { finder, characters }))
    }

    /// Replaces the special tokens of a text by their stand-ins.
    pub fn hide<'t>(&self, text: &'t str) -> Cow<'t, str> {
        self.finder.replace_all(text, |hit: &Captures<'_>| match self.characters.get(&hit[0]) {
            Some(character) => character.to_string(),
            None => hit[0].to_owned(),
        })
    }

    /// Replaces the stand-ins of a text by the special tokens' texts.
    pub fn reveal(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        for (token, character) in &self.characters {
            if text.get().contains(*character) {
                text.replace(*character, token)?;
            }
        }
        Ok(())
    }
}

// The texts of clients in a conversation: those of messages, calls, tools and template variables.

/// All texts.
fn texts_of(messages: &[Message], options: &ChatOptions) -> Vec<String> {
    let all = RefCell::new(Vec::new());
    with_texts(messages, options, &|text| {
        all.borrow_mut().push(text.to_owned());
        String::new()
    });
    all.into_inner()
}

/// A copy whose texts are changed.
fn with_texts(
    messages: &[Message],
    options: &ChatOptions,
    change: &impl Fn(&str) -> String,
) -> (Vec<Message>, ChatOptions) {
    let optional = |text: &Option<String>| text.as_deref().map(change);
    let call = |call: &ToolCall| ToolCall {
        id: change(&call.id),
        name: change(&call.name),
        arguments: match escaped(&call.arguments) {
            // Unchanged arguments keep their spelling.
            Some(value) => {
                let changed = changed_json(&value, change);
                if changed == value { call.arguments.clone() } else { changed.to_string() }
            }
            None => change(&call.arguments),
        },
    };
    let message = |message: &Message| Message {
        role: message.role,
        content: change(&message.content),
        name: optional(&message.name),
        reasoning: optional(&message.reasoning),
        tool_calls: message.tool_calls.iter().map(call).collect(),
        tool_call_id: optional(&message.tool_call_id),
    };
    let tool = |tool: &Tool| Tool {
        name: change(&tool.name),
        description: optional(&tool.description),
        parameters: tool.parameters.as_ref().map(|schema| changed_json(schema, change)),
        strict: tool.strict,
    };
    let options = ChatOptions {
        tools: options.tools.iter().map(tool).collect(),
        template_variables: changed_map(&options.template_variables, change),
        ..options.clone()
    };
    (messages.iter().map(message).collect(), options)
}

/// Arguments whose JSON has escapes, which hide characters of its texts.
fn escaped(arguments: &str) -> Option<Value> {
    arguments.contains('\\').then(|| serde_json::from_str(arguments).ok()).flatten()
}

fn changed_json(value: &Value, change: &impl Fn(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(change(text)),
        Value::Array(items) => items.iter().map(|item| changed_json(item, change)).collect(),
        Value::Object(map) => Value::Object(changed_map(map, change)),
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

fn changed_map(map: &Map<String, Value>, change: &impl Fn(&str) -> String) -> Map<String, Value> {
    map.iter().map(|(name, value)| (change(name), changed_json(value, change))).collect()
}

// Decodes a completion token by token.

/// Text that a token completed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextPiece {
    /// Whole UTF-8 characters; often empty.
    pub text: String,
    /// Whether a stop string was reached. `text` ends before it, or with it if the stream includes it, and
    /// all later pieces are empty.
    pub stopped: bool,
}

/// Decodes one completion token by token. Holds back incomplete UTF-8 and possible stop strings.
///
/// Invariant: all pieces concatenated, that of [`Self::finish`] included, equal [`Codec::decode`] of
/// all ids, cut before the first stop string.
pub struct TextStream {
    codec: Arc<Codec>,
    stop: Vec<String>,
    /// Whether the text contains the stop string that ended it.
    includes_stop: bool,
    /// Bytes of an incomplete character.
    bytes: Vec<u8>,
    /// Text that may begin a stop string.
    held: String,
    stopped: bool,
    /// Whether no character has been decoded yet.
    is_start: bool,
}

impl TextStream {
    /// A stream that ends before the first of `stop`. Empty stop strings are ignored.
    pub fn new(codec: Arc<Codec>, stop: &[String]) -> Self {
        let stop = stop.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self {
            codec,
            stop,
            includes_stop: false,
            bytes: Vec::new(),
            held: String::new(),
            stopped: false,
            is_start: true,
        }
    }

    /// The stream with the stop string in the text, or without.
    pub fn including_stop(self, includes_stop: bool) -> Self {
        Self { includes_stop, ..self }
    }

    /// Adds a token and returns the text that is certain now.
    pub fn push(&mut self, id: TokenId) -> TextPiece {
        if !self.stopped {
            self.bytes.extend_from_slice(&self.codec.text_bytes(id));
            self.decode();
        }
        self.release(false)
    }

    /// Ends the stream and returns the text that was held back.
    pub fn finish(&mut self) -> TextPiece {
        if !std::mem::take(&mut self.bytes).is_empty() {
            self.held.push(char::REPLACEMENT_CHARACTER);
        }
        self.release(true)
    }

    /// Moves whole characters from `bytes` to `held`. Invalid sequences become U+FFFD, split as by
    /// `String::from_utf8_lossy`.
    fn decode(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            let (mut valid, invalid) = (chunk.valid(), chunk.invalid());
            if self.is_start && !valid.is_empty() {
                valid = self.codec.alphabet.without_prefix(valid);
            }
            self.is_start &= chunk.valid().is_empty() && invalid.is_empty();
            self.held.push_str(valid);
            let incomplete = chunks.peek().is_none()
                && std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none());
            if incomplete {
                self.bytes = invalid.to_vec();
            } else if !invalid.is_empty() {
                self.held.push(char::REPLACEMENT_CHARACTER);
            }
        }
    }

    /// Returns the held text before the first stop string, or all of it except a possible beginning
    /// of one.
    fn release(&mut self, last: bool) -> TextPiece {
        if self.stopped {
            return TextPiece { text: String::new(), stopped: true };
        }
        let found = |stop: &String| Some((self.held.find(stop)?, stop.len()));
        if let Some((at, len)) = self.stop.iter().filter_map(found).min() {
            self.stopped = true;
            self.bytes.clear();
            self.held.truncate(if self.includes_stop { at + len } else { at });
            return TextPiece { text: std::mem::take(&mut self.held), stopped: true };
        }
        let keep = if last { 0 } else { longest_overlap(&self.held, &self.stop) };
        let held = self.held.split_off(self.held.len() - keep);
        TextPiece { text: std::mem::replace(&mut self.held, held), stopped: false }
    }
}

// Searches text that arrives in pieces.

/// The first of `tags` in `text`, with its place in bytes; of two at one place the longer one.
pub(crate) fn earliest<'t>(text: &str, tags: &'t [String]) -> Option<(usize, &'t str)> {
    let found = tags.iter().filter_map(|tag| Some((text.find(tag.as_str())?, tag.as_str())));
    found.min_by_key(|(at, tag)| (*at, std::cmp::Reverse(tag.len())))
}

/// Length in bytes of the longest end of `text` that is a proper beginning of one of `tags`.
pub(crate) fn longest_overlap(text: &str, tags: &[String]) -> usize {
    tags.iter().map(|tag| overlap(text, tag)).max().unwrap_or(0)
}

/// Length in bytes of the longest end of `text` that is a proper beginning of `tag`.
pub(crate) fn overlap(text: &str, tag: &str) -> usize {
    let longest = text.len().min(tag.len().saturating_sub(1));
    let fits = |n: &usize| {
        let end = text.len() - n;
        text.is_char_boundary(end) && tag.is_char_boundary(*n) && tag.get(..*n) == text.get(end..)
    };
    (1..=longest).rev().find(fits).unwrap_or(0)
}

#[cfg(test)]
mod tests;
