//! A streamed gRPC call over h2: headers, messages with a prefix of five bytes, and trailers with the status.
//! Where crates.io can be reached, the crate tonic does this and more.
use bytes::{Buf, BufMut, Bytes, BytesMut};
use h2::{client::SendRequest, RecvStream, Reason};
use http::{HeaderMap, Request};
use prost::Message;
use std::{env, fs::File, io::BufReader, marker::PhantomData, sync::Arc};
use tokio::net::TcpStream;
use tokio_rustls::{rustls, TlsConnector};

#[derive(Debug)]
pub struct Status {
    pub code: u32,
    pub message: String,
}

pub const CANCELLED: u32 = 1;
pub const ALREADY_EXISTS: u32 = 6;
pub const RESOURCE_EXHAUSTED: u32 = 8;
pub const UNAVAILABLE: u32 = 14;

pub fn unavailable(error: impl ToString) -> Status {
    Status { code: UNAVAILABLE, message: error.to_string() }
}

/// Connects to PAGEWIRE_TARGET by TLS, with the ca.crt of PAGEWIRE_CLIENT_TLS.
pub async fn connect() -> Result<SendRequest<Bytes>, Status> {
    let target = env::var("PAGEWIRE_TARGET").expect("PAGEWIRE_TARGET");
    let path = format!("{}/ca.crt", env::var("PAGEWIRE_CLIENT_TLS").expect("PAGEWIRE_CLIENT_TLS"));
    let mut roots = rustls::RootCertStore::empty();
    let mut file = BufReader::new(File::open(path).map_err(unavailable)?);
    roots.add_parsable_certificates(&rustls_pemfile::certs(&mut file).map_err(unavailable)?);
    let mut config = rustls::ClientConfig::builder().with_safe_defaults().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let socket = TcpStream::connect(&target).await.map_err(unavailable)?;
    let host = target.rsplit_once(':').map_or(target.as_str(), |(host, _)| host);
    let name = rustls::ServerName::try_from(host).map_err(unavailable)?;
    let stream = TlsConnector::from(Arc::new(config)).connect(name, socket).await.map_err(unavailable)?;
    let (client, connection) = h2::client::handshake(stream).await.map_err(unavailable)?;
    tokio::spawn(connection);
    client.ready().await.map_err(unavailable)
}

/// The messages of a call, which ends when it is dropped.
pub struct Stream<M> {
    body: RecvStream,
    sender: h2::SendStream<Bytes>,
    buffer: BytesMut,
    kind: PhantomData<M>,
}

pub async fn call<M: Message + Default>(
    client: &mut SendRequest<Bytes>, method: &str, request: &impl Message,
) -> Result<Stream<M>, Status> {
    let key = env::var("PAGEWIRE_CLIENT_API_KEY").unwrap_or_default();
    let head = Request::post(format!("https://{}/{method}", env::var("PAGEWIRE_TARGET").unwrap_or_default()))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("authorization", format!("Bearer {key}"));
    let (response, mut sender) = client.send_request(head.body(()).unwrap(), false).map_err(unavailable)?;
    let mut data = BytesMut::new();
    data.put_u8(0); // not compressed
    data.put_u32(request.encoded_len() as u32);
    request.encode(&mut data).unwrap();
    sender.send_data(data.freeze(), true).map_err(unavailable)?;
    let response = response.await.map_err(unavailable)?;
    status(response.headers())?; // an error without messages
    Ok(Stream { body: response.into_body(), sender, buffer: BytesMut::new(), kind: PhantomData })
}

fn status(headers: &HeaderMap) -> Result<(), Status> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("").to_string();
    match text("grpc-status").as_str() {
        "" | "0" => Ok(()),
        code => Err(Status { code: code.parse().unwrap_or(2), message: text("grpc-message") }),
    }
}

impl<M: Message + Default> Stream<M> {
    pub async fn next(&mut self) -> Result<Option<M>, Status> {
        loop {
            if self.buffer.len() >= 5 {
                let size = u32::from_be_bytes(self.buffer[1..5].try_into().unwrap()) as usize;
                if self.buffer.len() >= 5 + size {
                    self.buffer.advance(5);
                    return M::decode(self.buffer.split_to(size)).map(Some).map_err(unavailable);
                }
            }
            match self.body.data().await {
                Some(data) => {
                    let data = data.map_err(unavailable)?;
                    self.body.flow_control().release_capacity(data.len()).map_err(unavailable)?;
                    self.buffer.extend_from_slice(&data);
                }
                None => {
                    let trailers = self.body.trailers().await.map_err(unavailable)?;
                    return match trailers {
                        Some(trailers) => status(&trailers).map(|()| None),
                        None => Err(unavailable("the stream has no trailers")),
                    };
                }
            }
        }
    }

    pub fn cancel(mut self) {
        self.sender.send_reset(Reason::CANCEL);
    }
}
