fn main() -> std::io::Result<()> {
    prost_build::compile_protos(&["../../protos/pagewire/v1/inference_service.proto"], &["../../protos"])
}
