"""An endpoint picker of the Gateway API's inference extension, over Envoy's external processing."""
